"""How the traffic is made up, and who gets how much of the replicas for it."""
