"""Which replicas may be asked, and for how much."""
