"""A server that answers as one did in a recording, for those who write clients."""
