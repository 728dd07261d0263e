"""Golden transcripts of the wire: read, and played to a session and to a server."""
