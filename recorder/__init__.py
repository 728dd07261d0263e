"""How a session is kept: the log's format, its writer, its reader and its checks."""
