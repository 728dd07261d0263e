"""`antiphon fuzz`: hostile clients by the thousand, and a judge of what a server says to them."""
