"""Sockets: listening, TLS, HTTP, WebSockets, and the bounds of what clients send."""
