"""`antiphon fuzz`: hostile clients by the thousand, and a judge of a server's answers."""
