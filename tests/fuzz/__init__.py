"""The fuzzer: hostile clients, and a judge of what a server answers; `python -m tests.fuzz`."""
