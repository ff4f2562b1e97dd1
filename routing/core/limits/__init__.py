"""How much may be asked for: by one request, at once, over time, again."""
