"""Services for projects, pools, replicas, task groups, client keys and fleet settings."""
