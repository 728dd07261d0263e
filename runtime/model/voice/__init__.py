"""The published vocoder: speech codes to 24 kHz sound, by our own modules."""
