"""The audit log, and whether it is whole."""
