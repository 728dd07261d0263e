"""A recorded session that continues from one of its units with a change: `antiphon fork`."""
