"""Scraping: what every replica and router says of itself, at every tick (README.md of this package's parent)."""
