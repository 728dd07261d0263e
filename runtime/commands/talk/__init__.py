"""`antiphon talk`: a sound file, said to a server and answered."""
