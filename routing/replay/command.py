"""``python -m routing simulate``: arguments, files, progress and output."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from routing.replay.block_runs import Forest, ForestError
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import RequestTooLargeError, replay, report, table
from routing.replay.routed import UnsupportedInTracesError
from routing.replay.routers import Arrivals, SeveralRouters, Sharing, router_placers
from routing.replay.tiers import KV_BYTES_PER_TOKEN, TierConfig
from routing.schema import ConfigError, Settings, load_settings
from routing.traffic.columns import Columns
from routing.traffic.trace import TraceError, read_columns

MAX_ROUTERS = 64  # each has a residency index of its own
PROGRESS_S = 0.5  # between two progress lines


class UsageError(Exception):
    """Invalid arguments or files; the message names file, line and field."""


def main(argv: Sequence[str]) -> int:
    """Simulate and print the results; exit status 2 with one line on standard error for invalid input."""
    options = _parser().parse_args(argv)
    show_line = _progress_line()
    gc.disable()  # a replay creates no reference cycles, and the collector slows it
    try:
        reports = _simulate(options, show_line)
    except (UsageError, TraceError, ForestError, RequestTooLargeError, UnsupportedInTracesError) as error:
        show_line("")
        sys.stderr.write(f"simulate: {error}\n")
        return 2
    finally:
        gc.enable()
    show_line("")
    if options.json:
        rows = list(reports.values())
        sys.stdout.write(json.dumps(rows[0] if len(rows) == 1 else rows) + "\n")
    else:
        sys.stdout.write("\n".join(table(reports)) + "\n")
    return 0


def _simulate(options: argparse.Namespace, show_line: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Replay the trace under each policy: reports by policy file."""
    if len({tier.name for tier in options.tier}) < len(options.tier):
        raise UsageError("--tier: a name is given twice; each tier has its own name")
    config = _config(options)
    policies = {str(path): _read_policy(path) for path in options.policy}
    show_line(f"reading {options.trace}")
    columns = _read_trace(options.trace)
    forest = Forest(columns)
    reports = {}
    sharing, arrivals = Sharing(options.sharing), Arrivals(options.arrivals)
    delay_s = None if options.delay_ms is None else options.delay_ms / 1000
    routers = {"routers": options.routers, "sharing": sharing.value, "arrivals": arrivals.value}
    for name, settings in policies.items():
        try:
            placers = router_placers(settings, columns, config, options.replicas, options.routers)
            placer = placers[0] if len(placers) == 1 else SeveralRouters(placers, sharing, arrivals, delay_s)
        except UnsupportedInTracesError as error:
            raise UsageError(f"{name}: {error}") from None
        report_progress = _progress_callback(show_line, f"{name}: {{}} of {len(columns)} requests")
        result = replay(forest, [config] * options.replicas, placer, options.time_scale, progress=report_progress)
        reasons = {reason.value: count for reason, count in placer.reasons.most_common()}
        identity = {"policy": name, "strategy": settings.name, **routers}
        reports[name] = {**identity, **report(result, columns), "reasons": reasons}
    return reports


def _config(options: argparse.Namespace) -> FastEngineConfig:
    return FastEngineConfig(
        blocks=options.blocks,
        prefill_rate=options.prefill_rate,
        step_s=options.step_s,
        decode_s=options.decode_s,
        chunk_tokens=options.chunk,
        max_running=options.max_running,
        tiers=tuple(options.tier),
        kv_bytes_per_token=options.kv_bytes_per_token,
    )


def _read_policy(path: Path) -> Settings:
    try:
        return load_settings(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_trace(path: Path) -> Columns:
    try:
        columns = read_columns(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if not len(columns):
        raise UsageError(f"{path}: the trace has no requests")
    return columns


# --- progress ----------------------------------------------------------------------------------------


def _progress_line() -> Callable[[str], None]:
    """A function that replaces the progress line; it does nothing if standard error is no terminal."""
    if not sys.stderr.isatty():
        return lambda _line: None

    def show_line(line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    return show_line


def _progress_callback(show_line: Callable[[str], None], line: str) -> Callable[[int], None]:
    """A callback that shows the number of finished requests every ``PROGRESS_S``."""
    shown_s = time.monotonic()

    def report_progress(done: int) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= PROGRESS_S:
            shown_s = time.monotonic()
            show_line(line.format(done))

    return report_progress


# --- arguments ---------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing simulate",
        description="Replay a trace over modelled replicas, placed by the router's own strategies.",
    )
    add, count = parser.add_argument, _integer(10**9)
    add("--trace", type=Path, required=True, metavar="FILE", help="Mooncake's format, .jsonl or .jsonl.gz")
    add("--policy", type=Path, required=True, action="append", metavar="FILE",
        help='JSON: {"strategy": NAME, ...its settings}; repeat the option for one row per policy')  # fmt: skip
    add("--replicas", type=count, required=True, metavar="N")
    add("--blocks", type=count, required=True, metavar="C", help="blocks of 512 tokens in each replica's cache")
    for name, kind, default, text in (
        ("--time-scale", _positive_number, 1.0, "speed: 2 replays twice as fast"),
        ("--prefill-rate", _positive_number, 8000.0, "tokens/s"),
        ("--step-s", _number, 0.010, "seconds that any step takes"),
        ("--decode-s", _number, 0.0002, "additional seconds per decoding sequence"),
        ("--chunk", count, 2048, "prefill tokens in one step"),
        ("--max-running", count, 256, "sequences in one step"),
        ("--kv-bytes-per-token", count, KV_BYTES_PER_TOKEN,
         "size of the KV cache of a token, for --tier: 70B parameters, 8 KV heads, 16 bits"),
        ("--routers", _integer(MAX_ROUTERS), 1, f"routers that share the requests, 1 to {MAX_ROUTERS}"),
    ):  # fmt: skip
        add(name, type=kind, default=default, metavar="N", help=f"{text} (default %(default)s)")
    add("--tier", type=_tier, action="append", default=[], metavar="NAME:BLOCKS[:LATENCY_MS:GB_PER_S]",
        help="a cache tier below the GPU cache, fastest first: cpu (per replica) or remote (shared by all replicas); "
        "default latency and bandwidth: cpu 10 ms and 25 GB/s, remote 25 ms and 10 GB/s")  # fmt: skip
    add("--sharing", choices=[sharing.value for sharing in Sharing], default="none",
        help="what routers learn of each other's requests (default %(default)s)")  # fmt: skip
    add("--arrivals", choices=[arrivals.value for arrivals in Arrivals], default="random",
        help="router that a request arrives at (default %(default)s); worst: one that knows least of it")  # fmt: skip
    add("--delay-ms", type=_number, metavar="MS",
        help="until all routers know what is shared (default: 0 with events, 50 with state)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object; for several policies, a list")
    return parser


TIERS = {
    "cpu": TierConfig("cpu", 1, latency_s=0.010, bytes_per_s=25e9),  # 2,300 tokens in 40 ms
    "remote": TierConfig("remote", 1, latency_s=0.025, bytes_per_s=10e9, shared=True),  # 2,900 tokens in 120 ms
}


def _tier(text: str) -> TierConfig:
    name, *numbers = text.split(":")
    if name not in TIERS or len(numbers) not in {1, 3}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME:BLOCKS or NAME:BLOCKS:LATENCY_MS:GB_PER_S, with the name cpu or remote"
        )
    tier = replace(TIERS[name], blocks=_integer(10**9)(numbers[0]))
    if len(numbers) == 1:
        return tier
    return replace(tier, latency_s=_number(numbers[1]) / 1e3, bytes_per_s=_positive_number(numbers[2]) * 1e9)


def _integer(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return read


def _positive_number(text: str) -> float:
    value = _number(text)
    if not value:
        raise argparse.ArgumentTypeError("expected a number above 0")
    return value


def _number(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if 0 <= value <= 1e9:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1e9")
