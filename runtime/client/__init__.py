"""The client: a session message by message (`session`), and the SDK on it (`sdk`)."""
