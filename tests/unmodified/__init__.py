"""Clients of others, as they are installed, at a server: `tests.soak.clients` runs them."""
