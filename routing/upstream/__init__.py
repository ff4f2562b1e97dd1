"""Connections to replicas: addresses, the connection pool, and the router's own calls."""
