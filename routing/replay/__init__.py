"""``python -m routing simulate``: replays a trace under a policy with the router's own strategies."""
