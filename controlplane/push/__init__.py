"""Builds the configuration of routers from database rows, and sends it to them."""
