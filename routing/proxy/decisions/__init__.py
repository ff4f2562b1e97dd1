"""The latest decisions: where each request went, why, and what came of it."""
