"""Clients of others, as they are installed, at a server: `tests.soak_clients` runs them."""
