"""The tests; flat, one module for each module of the packages, and a few for the whole."""
