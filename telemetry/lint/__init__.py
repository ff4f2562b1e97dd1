"""Prompt lint: what prevents prompts of a task group from sharing cached prefixes, from hashes alone. Pure."""
