"""The log's bytes: records, their encoding, events and effects as records, versions."""
