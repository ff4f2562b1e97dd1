"""What a router counts of requests, and how it is told as Prometheus text."""
