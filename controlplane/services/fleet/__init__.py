"""What serves: pools, replicas, task groups, and what their clients may."""
