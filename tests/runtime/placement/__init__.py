"""Tests of `runtime.placement`."""
