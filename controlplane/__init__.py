"""What SHOULD happen: the fleet, its routing policies, and who changed what."""
