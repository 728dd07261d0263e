"""One session as it runs: its driver, its journal and its model calls."""
