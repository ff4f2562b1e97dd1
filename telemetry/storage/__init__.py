"""Readings in PostgreSQL: days as tables, rows going in, sums coming out, and the locks of who may work."""
