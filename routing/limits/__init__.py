"""Limits: request caps, concurrency, token buckets and the retry budget. Pure."""
