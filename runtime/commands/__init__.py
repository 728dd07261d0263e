"""The commands: talk, chat, transcribe, demo, doctor, schema, bench and quantize."""
