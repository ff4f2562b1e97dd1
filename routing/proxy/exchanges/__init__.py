"""What happens between the two: a request is placed, sent, perhaps sent elsewhere, answered and settled."""
