"""Services for service discovery: replica sources, their polls, and the replicas that follow them."""
