"""Prompt lint: where prompts of one purpose begin to differ although much that is the same follows. Pure."""
