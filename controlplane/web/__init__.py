"""Pages for operators: thin views, each a door to one service."""
