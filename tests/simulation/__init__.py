"""The simulated server: virtual time, a simulated model, disk and sockets."""
