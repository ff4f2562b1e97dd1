"""Benchmarks. Each prints a table; none is a test."""
