"""Tests of `runtime.session`."""
