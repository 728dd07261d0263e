"""Small models made for tests."""
