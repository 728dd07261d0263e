"""`antiphon bench`: the duration of a unit, and the capacity of the engine."""
