"""The models: which there are, their backends and the engine."""
