"""A stand-in for a vLLM replica: the same HTTP API and metrics, over a modelled engine."""
