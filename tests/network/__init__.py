"""Sockets for tests: listeners, peers, proxies that cut connections."""
