"""The wire as tables: a row a field, by which it is read, written, described and redacted."""
