"""The repository as tests read it: packages, commands, pages, evidence."""
