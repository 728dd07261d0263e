"""A server's life: starting, routing, limits of the process, stopping."""
