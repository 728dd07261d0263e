"""How a session is recorded: the log's format, writer, reader and checks."""
