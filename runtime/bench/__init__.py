"""`antiphon bench`: what units, replays, recordings and the engine cost."""
