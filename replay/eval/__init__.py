"""Measures of recorded conversations, from their logs."""
