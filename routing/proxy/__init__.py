"""What happens to a request: HTTP on both sides, the decision in between, and what both leave behind."""
