"""`antiphon chat`: a conversation with a server, in words."""
