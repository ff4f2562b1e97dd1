"""``python -m routing play``: traffic from traces or a generated mix, measured as a client sees it."""
