"""The wire as tables: one row a field, by which it is read, written, described and redacted."""
