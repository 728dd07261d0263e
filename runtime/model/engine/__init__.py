"""The engine, which batches the unit steps of all sessions of one model."""
