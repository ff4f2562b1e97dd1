"""Doors: parse, call one service, answer."""
