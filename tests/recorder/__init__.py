"""Tests of `recorder`."""
