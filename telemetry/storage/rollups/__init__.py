"""Readings added up to bins of 1 minute, 5 minutes and 1 hour: what is kept of them, how they are made and repaired."""
