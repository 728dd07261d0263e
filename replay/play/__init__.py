"""A server that answers as one did in a recording, for authors of clients."""
