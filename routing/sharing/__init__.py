"""Routers that share what they know: queued work and placed prompts, through a Redis-compatible server."""
