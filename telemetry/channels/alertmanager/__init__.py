"""Prometheus Alertmanager, by its API v2: README.md."""
