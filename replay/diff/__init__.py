"""Two sessions side by side, unit by unit: `antiphon diff`."""
