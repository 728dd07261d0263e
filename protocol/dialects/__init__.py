"""One file a dialect: pure projections between wire frames and canonical messages."""
