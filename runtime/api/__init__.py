"""The HTTP side of a server: all requests except WebSockets."""
