"""Serializers: what the REST API shows of each object, and what it accepts for it."""
