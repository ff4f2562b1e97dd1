"""The command line of ``python -m routing replica``.

A stand-in replica without its HTTP: the engine, its clock, its metrics, and the fault it is told to show.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from routing.simulation.engine import Engine, EngineConfig
from routing.simulation.real_time import RealTimeEngine
from routing.standin.errors import ApiError, CrashAfterChunks, Fault, Hang, NoFault, Refuse, Slow, queue_full
from routing.standin.generation import Generation
from routing.standin.metrics import EngineMetrics, Rejections, render
from routing.standin.process_metrics import HttpMetrics, process_families
from routing.standin.requests import Ask, Babble

DEFAULT_BLOCKS = 8193  # of 16 tokens, the null block included: 131,072 tokens, one prompt of the longest kind
LONGEST_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a stand-in replica is told at its start."""

    host: str
    port: int  # 0: any free one
    model: str
    engine: EngineConfig
    seed: int  # of the pseudo-words: replicas with one seed answer alike
    api_key: str | None
    max_queued_requests: int | None  # running and waiting; None: no limit
    auto_tools: bool


def parse_settings(argv: Sequence[str]) -> ReplicaSettings:
    """Read the command line; exits with a message where it is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    capacity = (given.blocks - 1) * given.block_tokens
    longest = min(LONGEST_TOKENS, capacity) if given.max_model_len is None else given.max_model_len
    for name in ("prefill_rate", "block_tokens", "chunk", "max_running"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if given.step_s < 0 or given.decode_s < 0:
        parser.error("--step-s and --decode-s must not be negative")
    if not 0 < given.kv_cache_metrics_sample <= 1:
        parser.error("--kv-cache-metrics-sample must be above 0 and at most 1")
    if not 1 < longest <= capacity:
        parser.error(f"--max-model-len {longest} does not fit: {capacity} tokens of KV cache (one block is never used)")
    engine = EngineConfig(
        blocks=given.blocks - 1,
        block_tokens=given.block_tokens,
        prefill_rate=given.prefill_rate,
        step_s=given.step_s,
        decode_s=given.decode_s,
        chunk_tokens=given.chunk,
        max_running=given.max_running,
        max_model_len=longest,
        block_sample_ratio=given.kv_cache_metrics_sample if given.kv_cache_metrics else 0.0,
    )
    return ReplicaSettings(
        host=given.host,
        port=given.port,
        model=given.model,
        engine=engine,
        seed=given.seed,
        api_key=given.api_key,
        max_queued_requests=given.max_num_queued_reqs,
        auto_tools=given.enable_auto_tool_choice,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing replica", description="A stand-in for a vLLM 0.32 replica."
    )
    add = parser.add_argument
    add("--port", type=int, required=True, help="0 takes any free port; the port is printed")
    add("--host", default="127.0.0.1")
    add("--model", default="warmpath-demo", help="the served model's name (default %(default)s)")
    add("--blocks", type=int, default=DEFAULT_BLOCKS, help="KV blocks, one of them never used (default %(default)s)")
    add("--block-tokens", type=int, default=16, help="tokens a block holds (default %(default)s)")
    add("--prefill-rate", type=float, default=8000.0, help="tokens/s (default %(default)s)")
    add("--step-s", type=float, default=0.010, help="seconds any step takes (default %(default)s)")
    add("--decode-s", type=float, default=0.0002, help="seconds more per decoding sequence (default %(default)s)")
    add("--chunk", type=int, default=2048, help="prefill tokens a step may carry (default %(default)s)")
    add("--max-running", type=int, default=256, help="sequences in one step (default %(default)s)")
    add("--max-model-len", type=int, help="tokens of prompt and answer (default: what the cache holds, to 131072)")
    add("--max-num-queued-reqs", type=int, help="503 above this many running and waiting requests (default: no limit)")
    add("--kv-cache-metrics", action="store_true", help="report how long sampled KV blocks live")
    add("--kv-cache-metrics-sample", type=float, default=0.01, help="share of the blocks (default %(default)s)")
    add("--api-key", help="ask for this bearer token under /v1")
    add("--enable-auto-tool-choice", action="store_true", help="accept tool_choice auto; tools are never called")
    add("--seed", type=int, default=0, help="of the answers' pseudo-words (default %(default)s)")
    return parser


class Replica:
    """Everything that the HTTP handlers share. Make it on the loop that it will run on."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.engine = Engine(settings.engine)
        self.runtime = RealTimeEngine(self.engine, asyncio.get_running_loop())
        self.http = HttpMetrics()
        self.in_flight = 0  # HTTP requests for a generation
        self.is_asleep = False
        self.fault: Fault = NoFault()
        self._babble = Babble(settings.seed)
        self._rejections = Rejections()
        engine_metrics = EngineMetrics(self.engine, settings.model, self._rejections)
        self._families = [*process_families(), *engine_metrics.families]

    def generate(self, ask: Ask) -> Generation:
        """Make a generation, not yet started; ApiError where the queue is full or a fault refuses it."""
        if isinstance(self.fault, Refuse):
            raise ApiError(self.fault.status, "Service Unavailable", "The stand-in was told to refuse requests.")
        limit = self.settings.max_queued_requests
        if limit is not None and self.engine.outstanding >= limit:
            self._rejections.requests += 1
            raise queue_full()
        return Generation(ask, self._babble, self.runtime)

    @property
    def crash(self) -> CrashAfterChunks | None:
        """The fault that breaks streams, if that is the one."""
        return self.fault if isinstance(self.fault, CrashAfterChunks) else None

    def set_fault(self, fault: Fault) -> None:
        """Show another fault, or none, from now on."""
        self.fault = fault
        self.engine.slowdown = fault.factor if isinstance(fault, Slow) else 1.0
        self._pause_or_resume()

    def sleep(self) -> None:
        """Stand still and forget the cache, as vLLM does without its sleep mode."""
        self.is_asleep = True
        self._pause_or_resume()
        self.engine.pool.reset()

    def wake(self) -> None:
        """Go on."""
        self.is_asleep = False
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        should_pause = self.is_asleep or isinstance(self.fault, Hang)
        if should_pause and not self.runtime.is_paused:
            self.runtime.pause()
        elif not should_pause and self.runtime.is_paused:
            self.runtime.resume()

    def metrics_page(self) -> bytes:
        """The body of ``/metrics``."""
        return render(self._families + self.http.families)
