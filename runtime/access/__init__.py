"""Who may do what: API keys with their limits, and web origins."""
