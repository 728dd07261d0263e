"""A server's metrics, logs, spans and status."""
