"""KV cache events of replicas: what each engine has cached, as vLLM publishes it; ``README.md`` lists the files."""
