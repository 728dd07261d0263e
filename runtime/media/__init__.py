"""Decoding of clients' media: `decoder` decides where, the other modules decode."""
