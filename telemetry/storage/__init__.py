"""Readings in PostgreSQL: daily partitions, inserts, rollups, sums, and the locks of periodic tasks."""
