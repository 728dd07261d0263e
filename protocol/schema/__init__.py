"""The wire protocols, described by running their own parsers and writers: see `wire.describe`."""
