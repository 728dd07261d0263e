"""Parts that several rooms of replay use."""
