"""Redaction: a log without what was said and shown, that still replays."""
