"""Writing logs: the recorder, the log of a session, its file and its disk."""
