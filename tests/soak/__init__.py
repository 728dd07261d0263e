"""Scripts of `make soak`: each runs for minutes, and keeps its numbers under docs/evidence."""
