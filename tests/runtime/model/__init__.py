"""Tests of the models and the engine."""
