"""A model run over recorded sessions, and measured: `antiphon eval`."""
