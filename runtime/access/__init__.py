"""Access control: API keys with their limits, and web origins."""
