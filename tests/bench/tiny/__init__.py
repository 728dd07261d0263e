"""What the embedded model can do, measured: `python -m tests.bench.tiny.score`."""
