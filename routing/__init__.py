"""What happens to a request: the router, its placement algorithms and a model of the engine behind it."""

__version__ = "0.1.0"
