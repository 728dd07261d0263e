"""A recorded session taken up again at a unit, with something changed: `antiphon fork`."""
