"""What a request would cost at each candidate, and the least of it."""
