"""Tests of `runtime.client`."""
