"""The session: its states, its courses, the unit loop and its barrier."""
