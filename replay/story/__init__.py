"""A recorded session's story, read once from its log; each command tells of it what it is for."""
