"""How a published revision comes into force: stages, what is tolerated of them, and every move."""
