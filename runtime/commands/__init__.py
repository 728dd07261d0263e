"""The commands: talk, chat, transcribe, demo, doctor, workers, schema, bench and quantize."""
