"""A server's life: starting, routing, placement of models, retention, stopping."""
