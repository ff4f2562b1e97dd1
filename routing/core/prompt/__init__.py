"""Bytes of a request's body -> the prompt as every hash reads it, its keys, its block hashes."""
