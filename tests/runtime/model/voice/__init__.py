"""Tests of the published voice."""
