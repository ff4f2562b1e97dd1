"""Policies from draft to revision: what their settings may be, what is likely a mistake, what differs."""
