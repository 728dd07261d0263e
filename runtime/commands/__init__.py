"""The commands: talk, chat, transcribe, demo, doctor, schema and bench."""
