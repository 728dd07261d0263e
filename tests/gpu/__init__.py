"""What to run on a GPU: `python -m tests.gpu`."""
