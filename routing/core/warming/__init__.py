"""What is worth sending to a replica that joins."""
