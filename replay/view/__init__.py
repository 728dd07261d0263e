"""A recorded session as one HTML file: both voices, what the model did, every record."""
