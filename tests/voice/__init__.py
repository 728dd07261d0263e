"""The published voice's numbers: a check of our modules against them, and their time."""
