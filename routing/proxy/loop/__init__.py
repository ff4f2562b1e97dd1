"""The turns of the event loop: one timer for all waits, the writes of a turn together, long work a little at a time."""
