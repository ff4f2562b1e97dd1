"""A configuration made ready to place requests: pools, task groups, trials and strategies put together."""
