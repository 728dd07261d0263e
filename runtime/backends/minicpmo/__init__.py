"""MiniCPM-o 4.5 as our own modules; see `model.py` for how they fit together."""
