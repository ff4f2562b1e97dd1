"""Health of replicas: active checks, circuit breaker, stall detection, warm-up."""
