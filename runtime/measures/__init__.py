"""How a conversation went: who is heard when, and what is measured in it, live or from a log."""
