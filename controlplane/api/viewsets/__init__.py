"""Viewsets: each parses a request, calls one service and responds."""
