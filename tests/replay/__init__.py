"""Tests of `replay`."""
