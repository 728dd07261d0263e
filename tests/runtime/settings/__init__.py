"""Tests of `runtime.settings`."""
