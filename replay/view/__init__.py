"""A recorded session as one HTML file: both voices, the model's work, every record."""
