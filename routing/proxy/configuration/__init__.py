"""The configuration: pushed or read, checked, kept on disk."""
