"""Tests of `runtime.net`."""
