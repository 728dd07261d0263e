"""The wire protocols as JSON Schema, from their tables: see `wire.describe`."""
