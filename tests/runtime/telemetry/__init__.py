"""Tests of `runtime.telemetry`."""
