"""What a session is: pure values and functions, no async, clock, randomness, files or threads."""
