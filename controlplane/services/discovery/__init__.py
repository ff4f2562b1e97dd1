"""Replicas that are found rather than written down."""
