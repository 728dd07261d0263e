"""The commands: talk, chat, transcribe, demo, doctor, workers and schema."""
