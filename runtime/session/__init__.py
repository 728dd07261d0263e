"""Sessions as they run: the server, drivers, journals, model calls, clients, recovery and forks."""
