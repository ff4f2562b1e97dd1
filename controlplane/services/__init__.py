"""The only writers. One verb per function: atomic, typed, recorded as an event."""
