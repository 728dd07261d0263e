"""The session: its states and kinds, the unit loop and its barrier."""
