"""Alerts: rules that are evaluated, what their answers change, and what is told of it."""
