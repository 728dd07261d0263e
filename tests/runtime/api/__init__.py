"""Tests of `runtime.api`."""
