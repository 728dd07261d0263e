"""The worker: serves one model to gateways, in a process of its own."""
