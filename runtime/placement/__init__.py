"""Where the models of a server are: in its own process, in workers that it starts, or elsewhere."""
