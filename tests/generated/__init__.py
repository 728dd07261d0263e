"""Clients drawn from a number, played to a server in memory and recorded."""
