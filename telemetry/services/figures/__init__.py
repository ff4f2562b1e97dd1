"""Figures from readings for pages and the API, of a fleet, pool, task group or replica."""
