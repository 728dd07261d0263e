"""Sockets for tests: listeners, peers, proxies that cut connections, and a fake llama.cpp-omni."""
