"""Metrics and decision records of the router."""
