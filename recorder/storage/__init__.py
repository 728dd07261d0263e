"""A folder of logs: where they are, which there are, how long they stay."""
