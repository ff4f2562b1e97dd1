"""Strategies: how a replica is chosen. ``registry.py`` maps their names to classes."""
