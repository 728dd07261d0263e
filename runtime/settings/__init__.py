"""The settings: their table, and where their values come from."""
