"""What each replica is believed to hold in its cache."""
