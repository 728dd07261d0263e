"""What a server shows of itself: metrics, logs, spans and its status."""
