"""Tests of `runtime.media`."""
