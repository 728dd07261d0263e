"""Logs of a forger who computes correct checksums, and the cost of reading them."""
