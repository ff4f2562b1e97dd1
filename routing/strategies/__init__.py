"""Placement strategies, one a file: which replica gets a request, and why."""
