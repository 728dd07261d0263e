"""The connection between a gateway and a worker: a model in a process of its own."""
