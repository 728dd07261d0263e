"""Models behind one protocol, which `base` defines."""
