"""The HTTP side of a server: what it serves beside WebSockets."""
