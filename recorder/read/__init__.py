"""Reading a log: scanning, records, summaries and the check of its integrity."""
