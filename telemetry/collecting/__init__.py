"""Collecting what routers decided: asked for page by page, thinned to a budget, stored once each."""
