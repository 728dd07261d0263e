"""The commands: talk, chat, transcribe, demo, doctor, workers, schema and quantize."""
