"""Shrinking: the smallest log on which a command still fails."""
