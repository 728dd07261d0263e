"""How a setting reaches a server: its one declaration, and where its value may come from."""
