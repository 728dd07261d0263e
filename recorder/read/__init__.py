"""Reading a log: scanning, records, places and a session's past."""
