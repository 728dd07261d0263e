"""Writing a log: the writer, its syncs, its lock and its disk."""
