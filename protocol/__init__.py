"""What a session is: pure values and functions, without async, clock, randomness, files or threads."""
