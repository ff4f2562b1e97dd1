"""The event loop: one timer for all waits, a turn's writes together, long work in turns, mistakes that end nothing."""
