"""What compares Antiphon with yardsticks, and what scores the embedded model: no part of it."""
