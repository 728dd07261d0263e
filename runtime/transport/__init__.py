"""Between a socket and a WebSocket or HTTP: bytes, their limits, and enforcement."""
