"""Hypothesis strategies: messages, wire frames and scripts of the model."""
