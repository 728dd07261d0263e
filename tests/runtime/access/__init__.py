"""Tests of `runtime.access`."""
