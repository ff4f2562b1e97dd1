"""From rows to routers: what they should run, and how it gets there."""
