"""Tests of `runtime.webrtc`."""
