"""Decoding of what clients send: `decoder` says who decodes what, and the rest does it."""
