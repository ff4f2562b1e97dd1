"""Request -> task group; what holds for a group, and which replicas serve it."""
