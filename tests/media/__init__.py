"""Pictures and videos made for tests."""
