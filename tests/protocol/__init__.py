"""Tests of `protocol`."""
