"""Tests of `runtime.slots`."""
