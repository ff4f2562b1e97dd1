"""The columns that tables sort by."""

REPLICA_COLUMNS = (
    "name",
    "pool",
    "health",
    "hit_rate_ratio",
    "ttft_p50_s",
    "ttft_p95_s",
    "running",
    "waiting",
    "kv_usage_ratio",
    "requests_per_s",
    "prompt_tokens_per_s",
)
GROUP_COLUMNS = (
    "name",
    "pool",
    "hit_rate_ratio",
    "ttft_p50_s",
    "ttft_p95_s",
    "plain_p95_s",
    "requests_per_s",
    "prompt_tokens_per_s",
    "failed_ratio",
)
