"""How a session runs: server, admission, the unit loop's engine, model backends, command line."""
