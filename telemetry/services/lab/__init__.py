"""What routers decided, replayed and explained: ladders, prefixes, prompts, single requests."""
