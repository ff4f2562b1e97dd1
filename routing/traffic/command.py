"""``python -m routing play --router URL (--trace FILE | --mix SEED)``: a trace or the mix, played through a router."""

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

from routing.traffic.client import ChatClient, one_line, total
from routing.traffic.mix import DEFAULT_RATE, Mix, TraceWorkload
from routing.traffic.player import PlayConfig, Player
from routing.traffic.trace import TraceError, Workload, read_trace

SUMMARY_S = 10.0  # between two lines
ANSWER_TIMEOUT_S = 600.0  # for the whole of an answer
SILENCE_TIMEOUT_S = 120.0  # between two reads of it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m routing play", description="Play traffic through a router.")
    add = parser.add_argument
    add("--router", required=True, metavar="URL", help="base URL of the router's data port")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace in Mooncake's format, .jsonl or .jsonl.gz")
    source.add_argument("--mix", type=int, metavar="SEED", help="the generated mix; it has no end")
    add("--time-scale", type=float, default=1.0, help="2 plays twice as fast (default %(default)s)")
    add("--rate", type=float, help=f"requests/s: of the mix (default {DEFAULT_RATE:g}); of a trace, sets --time-scale")
    add("--tokens-per-s", type=float, metavar="R", help="prompt tokens/s of a trace; sets --time-scale")
    add("--loop", action="store_true", help="begin a trace again when it ends")
    add("--requests", type=int, help="stop after so many")
    add("--model", help="the model's name (default: whichever the router serves)")
    add("--in-flight", type=int, default=64, help="requests at once (default %(default)s)")
    add("--report", type=Path, metavar="FILE", help="write the final report there")
    return parser


def _workload(given: argparse.Namespace) -> tuple[Workload, float]:
    """The workload asked for, and its time scale."""
    if given.trace is None:
        return Mix(given.mix, given.rate or DEFAULT_RATE), given.time_scale
    requests = read_trace(given.trace)
    scale = given.time_scale
    lasts_s = requests[-1].at_s if len(requests) > 1 else 0.0
    if given.rate and lasts_s:
        scale = given.rate * lasts_s / len(requests)
    elif given.tokens_per_s and lasts_s:
        scale = given.tokens_per_s * lasts_s / sum(request.prompt_tokens for request in requests)
    return TraceWorkload(requests, given.loop), scale


async def _summaries(player: Player) -> None:
    """A line every ten seconds, of those ten seconds."""
    while True:
        await asyncio.sleep(SUMMARY_S)
        recent = total(player.recent)
        player.recent.clear()
        print(one_line(recent, SUMMARY_S), flush=True)  # noqa: T201


async def _play(given: argparse.Namespace, workload: Workload, scale: float) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=5.0, sock_read=SILENCE_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    config = PlayConfig(given.model, scale, given.requests, given.in_flight)
    started = datetime.now(UTC)
    began_s = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        player = Player(ChatClient(http, f"{given.router.rstrip('/')}/v1/chat/completions"), config)
        playing = asyncio.create_task(player.play(workload))
        summaries = asyncio.create_task(_summaries(player))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, playing.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        summaries.cancel()
        player.cancel()
        await asyncio.gather(summaries, return_exceptions=True)
        seconds = time.monotonic() - began_s
        return {"started_at": started.isoformat(), **player.report(seconds)}


def main(argv: Sequence[str] | None = None) -> int:
    """Play until the workload ends or SIGTERM; 0, or 2 where the trace cannot be read."""
    parser = _parser()
    given = parser.parse_args(argv)
    for name in ("time_scale", "rate", "tokens_per_s", "in_flight", "requests"):
        number = getattr(given, name)
        if number is not None and not 0 < number < math.inf:
            parser.error(f"--{name.replace('_', '-')}: expected a finite number above 0")
    try:
        workload, scale = _workload(given)
    except (OSError, TraceError) as error:
        print(f"cannot read the trace: {error}", file=sys.stderr)  # noqa: T201
        return 2
    report = json.dumps(uvloop.run(_play(given, workload, scale)), indent=1)
    if given.report is not None:
        given.report.write_text(f"{report}\n")
    else:
        print(report, flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
