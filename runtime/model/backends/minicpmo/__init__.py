"""MiniCPM-o 4.5 in modules of our own; `model.py` describes how they fit together."""
