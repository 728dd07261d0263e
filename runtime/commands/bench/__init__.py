"""`antiphon bench`: the costs of units, replays, recordings and the engine."""
