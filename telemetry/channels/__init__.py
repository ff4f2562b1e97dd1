"""Channels: the ways an alert leaves. One folder each; registry.py names them."""
