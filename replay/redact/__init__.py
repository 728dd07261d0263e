"""Redaction: a log without its content, which still replays."""
