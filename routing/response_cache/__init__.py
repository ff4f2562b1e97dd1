"""Exact response caches: deterministic requests that were answered before cost no replica anything."""
