"""Expositions of replicas and routers."""

from __future__ import annotations

TTFT_EDGES = (0.1, 0.5, 1.0, 5.0)


def replica_text(
    queries=0,
    hits=0,
    *,
    engine="0",
    model="tiny",
    finished=0,
    running=0.0,
    waiting=0.0,
    usage=0.0,
    started=None,
    ttft=(),
    prompt_tokens=None,
    external_hits=None,
    blocks=2049,
    block_size=16,
    facts=True,
):
    """``ttft`` is counts per bucket of TTFT_EDGES and above."""
    labels = f'engine="{engine}",model_name="{model}"'
    lines = [
        f"vllm:prefix_cache_queries_total{{{labels}}} {queries}",
        f"vllm:prefix_cache_hits_total{{{labels}}} {hits}",
        f'vllm:request_success_total{{engine="{engine}",finished_reason="stop",model_name="{model}"}} {finished}',
        f"vllm:num_requests_running{{{labels}}} {running}",
        f"vllm:num_requests_waiting{{{labels}}} {waiting}",
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
        f"vllm:prompt_tokens_total{{{labels}}} {queries if prompt_tokens is None else prompt_tokens}",
    ]
    if external_hits is not None:
        lines.append(f"vllm:external_prefix_cache_hits_total{{{labels}}} {external_hits}")
    if started is not None:
        lines.append(f"process_start_time_seconds {started}")
    if facts:
        lines.append(
            f'vllm:cache_config_info{{block_size="{block_size}",engine="{engine}",num_gpu_blocks="{blocks}"}} 1.0'
        )
    if ttft:
        lines += _histogram("vllm:time_to_first_token_seconds", labels, ttft)
    return "\n".join(lines) + "\n"


def _histogram(name, labels, counts):
    total = 0
    for edge, count in zip((*TTFT_EDGES, "+Inf"), counts, strict=True):
        total += count
        yield f'{name}_bucket{{{labels},le="{edge}"}} {total}'
    yield f"{name}_sum{{{labels}}} 1.5"
    yield f"{name}_count{{{labels}}} {total}"


def router_text(*routes, boot="b1", name="router-1"):
    """Routes are dicts: pool, group, replica, policy, revision, and counters by short name.

    ttft, policy_ttft, the one by revision, and those by reuse, hit_ttft and miss_ttft, are {position: count}.
    ``requests`` is {outcome: count}, or {(reason, outcome): count}.
    """
    lines = [f'warmpath_router_info{{router="{name}",boot="{boot}",version="1"}} 1']
    for route in routes:
        lines += _route_lines(dict(route))
    return "\n".join(lines) + "\n"


def _route_lines(route):
    pool, group, replica = route.pop("pool", "chat"), route.pop("group", ""), route.pop("replica", "r1")
    base = f'pool="{pool}",group="{group}",replica="{replica}"'
    policy = f'policy="{route.pop("policy", "chat")}",revision="{route.pop("revision", 1)}"'
    labels = f"{base},{policy}"
    yield from _ttft_lines("ttft_seconds", base, route.pop("ttft", {}))
    by_policy = f'pool="{pool}",group="{group}",{policy}'
    yield from _ttft_lines("policy_ttft_seconds", by_policy, route.pop("policy_ttft", {}))
    for reuse in ("hit", "miss"):
        by_reuse = f'pool="{pool}",group="{group}",reuse="{reuse}"'
        yield from _ttft_lines("reuse_ttft_seconds", by_reuse, route.pop(f"{reuse}_ttft", {}))
    for response in ("streamed", "plain"):
        of_kind = f'{base},response="{response}"'
        yield from _ttft_lines("latency_seconds", of_kind, route.pop(f"{response}_latency", {}))
        of_kind = f'{by_policy},response="{response}"'
        yield from _ttft_lines("policy_latency_seconds", of_kind, route.pop(f"policy_{response}_latency", {}))
    for what, count in route.pop("requests", {}).items():
        reason, outcome = what if isinstance(what, tuple) else ("affinity", what)
        yield f'warmpath_router_requests_total{{{labels},reason="{reason}",outcome="{outcome}"}} {count}'
    for short, count in route.items():
        yield f"warmpath_router_{short}_total{{{labels}}} {count}"


def _ttft_lines(name, labels, ttft):
    if ttft:
        total = 0
        for position, count in sorted(ttft.items()):
            total += count
            yield f'warmpath_router_{name}_bucket{{{labels},le="{0.001 * 1.05**position:.9g}"}} {total}'
        yield f'warmpath_router_{name}_bucket{{{labels},le="+Inf"}} {total}'
        yield f"warmpath_router_{name}_sum{{{labels}}} 1.0"
        yield f"warmpath_router_{name}_count{{{labels}}} {total}"
