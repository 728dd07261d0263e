"""What lies between a socket and a WebSocket or HTTP: bytes, their limits, and who goes too far."""
