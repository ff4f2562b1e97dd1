"""Rows as JSON, and JSON as arguments of services. What a service checks is not checked here again."""
