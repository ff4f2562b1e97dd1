"""What DID happen: readings of replicas and routers, dashboards and alerts."""
