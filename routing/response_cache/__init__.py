"""Response caches: requests that were answered before, or mean the same as one that was, cost no replica anything."""
