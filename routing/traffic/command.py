"""``python -m routing play --router URL (--trace FILE | --mix SEED)``: send traffic to a router."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from routing.traffic.client import ChatClient, summary_line, total
from routing.traffic.mix import DEFAULT_RATE, Mix, TraceWorkload
from routing.traffic.player import PlayConfig, Player
from routing.traffic.trace import TraceError, Workload, read_trace

SUMMARY_S = 10.0  # between two summary lines
RESPONSE_TIMEOUT_S = 600.0  # of a whole response
READ_TIMEOUT_S = 120.0  # between two reads of it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m routing play", description="Play traffic through a router.")
    add = parser.add_argument
    add("--router", required=True, metavar="URL", help="base URL of the router's data port")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace in Mooncake's format, .jsonl or .jsonl.gz")
    source.add_argument("--mix", type=int, metavar="SEED", help="seed of endless generated traffic")
    add("--time-scale", type=float, default=1.0, help="2 plays twice as fast (default %(default)s)")
    add("--rate", type=float, help=f"requests/s: of the mix (default {DEFAULT_RATE:g}); of a trace, sets --time-scale")
    add("--tokens-per-s", type=float, metavar="RATE", help="prompt tokens/s of a trace; sets --time-scale")
    add("--loop", action="store_true", help="repeat the trace")
    add("--requests", type=int, help="stop after this many requests")
    add("--model", help="name of the model (default: the router's)")
    add("--in-flight", type=int, default=64, help="concurrent requests (default %(default)s)")
    add("--report", type=Path, metavar="FILE", help="write the final report to this file")
    return parser


def _workload(options: argparse.Namespace) -> tuple[Workload, float]:
    """The workload and its time scale."""
    if options.trace is None:
        return Mix(options.mix, options.rate or DEFAULT_RATE), options.time_scale
    requests = read_trace(options.trace)
    scale = options.time_scale
    duration_s = requests[-1].at_s if len(requests) > 1 else 0.0
    if options.rate and duration_s:
        scale = options.rate * duration_s / len(requests)
    elif options.tokens_per_s and duration_s:
        scale = options.tokens_per_s * duration_s / sum(request.prompt_tokens for request in requests)
    return TraceWorkload(requests, options.loop), scale


async def _print_summaries(player: Player) -> None:
    while True:
        await asyncio.sleep(SUMMARY_S)
        recent = total(player.recent)
        player.recent.clear()
        print(summary_line(recent, SUMMARY_S), flush=True)  # noqa: T201


async def _play(options: argparse.Namespace, workload: Workload, scale: float) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_S, sock_connect=5.0, sock_read=READ_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    config = PlayConfig(options.model, scale, options.requests, options.in_flight)
    started = datetime.now(UTC)
    started_s = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        player = Player(ChatClient(http, f"{options.router.rstrip('/')}/v1/chat/completions"), config)
        playing = asyncio.create_task(player.play(workload))
        summaries = asyncio.create_task(_print_summaries(player))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, playing.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        summaries.cancel()
        player.cancel()
        await asyncio.gather(summaries, return_exceptions=True)
        seconds = time.monotonic() - started_s
        return {"started_at": started.isoformat(), **player.report(seconds)}


def main(argv: Sequence[str] | None = None) -> int:
    """Play until the workload ends or SIGTERM; exit status 2 if the trace cannot be read."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("time_scale", "rate", "tokens_per_s", "in_flight", "requests"):
        number = getattr(options, name)
        if number is not None and not 0 < number < math.inf:
            parser.error(f"--{name.replace('_', '-')}: expected a finite number above 0")
    try:
        workload, scale = _workload(options)
    except (OSError, TraceError) as error:
        print(f"cannot read the trace: {error}", file=sys.stderr)  # noqa: T201
        return 2
    report = json.dumps(uvloop.run(_play(options, workload, scale)), indent=1)
    if options.report is not None:
        options.report.write_text(f"{report}\n")
    else:
        print(report, flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
