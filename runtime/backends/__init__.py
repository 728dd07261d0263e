"""Models behind one protocol: `base` says what is asked of them."""
