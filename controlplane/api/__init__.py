"""The REST API: each view parses a request, calls one service and responds."""
