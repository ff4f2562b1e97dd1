"""Key -> the replicas in the order in which they are its home, and how far to follow it."""
