"""`python -m tests.bench.gateway`: what the server itself adds to a unit, beside two yardsticks."""
