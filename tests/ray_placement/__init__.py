"""The package of `examples/ray_placement`, with a cluster of these tests."""
