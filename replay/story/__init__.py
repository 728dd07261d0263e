"""The story of a recorded session, read once from its log for several commands."""
