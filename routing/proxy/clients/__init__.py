"""A client's side: its connection, what it may ask for, and what is read of it."""
