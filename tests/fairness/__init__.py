"""Adversaries of `tests.law`, one kind each."""
