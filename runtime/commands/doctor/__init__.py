"""`antiphon doctor`: whether a model would be served here."""
