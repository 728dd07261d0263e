"""Tests of `runtime.serve`."""
