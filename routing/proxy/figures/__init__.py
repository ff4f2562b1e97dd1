"""What the admin port shows: counts, decisions, loads; written so that requests never wait for it."""
