"""`antiphon transcribe`: have a server write down a sound file."""
