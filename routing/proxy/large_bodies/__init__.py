"""Large bodies are read by another process, so that nobody else's request waits for them."""
