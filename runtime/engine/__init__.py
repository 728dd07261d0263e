"""The engine: the unit steps of all sessions of one model, run together."""
