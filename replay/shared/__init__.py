"""What several rooms of replay use."""
