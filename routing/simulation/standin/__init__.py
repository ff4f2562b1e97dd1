"""A stand-in for a vLLM replica: the modelled engine behind vLLM's HTTP, in vLLM 0.32's words."""
