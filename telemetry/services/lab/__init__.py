"""What routers decided, replayed and explained: breakdowns, prefixes, prompts, single requests."""
