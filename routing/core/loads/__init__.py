"""What each replica is doing, how fast, and who may be chosen."""
