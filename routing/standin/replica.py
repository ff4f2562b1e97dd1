"""A stand-in replica without its HTTP server: settings, engine, generations, metrics, and the injected fault."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from routing.simulation.engine import Engine, EngineConfig, Siblings
from routing.simulation.engine import Sequence as EngineSequence
from routing.simulation.real_time import RealTimeEngine
from routing.standin.errors import ApiError, CrashAfterChunks, Fault, Hang, NoFault, Refuse, Slow, queue_full
from routing.standin.metrics import page
from routing.standin.requests import TOKEN_BYTES, GenerationRequest, PseudoWords, block_keys, count_tokens
from routing.standin.transfers import LoadFailurePolicy, Role, Transfers

if TYPE_CHECKING:
    from routing.standin.kv_events import KvEventPublisher

DEFAULT_BLOCKS = 8193  # of 16 tokens, the null block included: 131,072 tokens, one prompt of maximum length
MAX_MODEL_LEN = 131_072


class KvEventsConfig(msgspec.Struct):
    """The value of ``--kv-events-config``, with vLLM's names and defaults."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class Task(StrEnum):
    """What the model is for, which determines the endpoints."""

    GENERATE = "generate"
    POOLING = "pooling"
    TRANSCRIPTION = "transcription"


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of a stand-in replica."""

    host: str
    port: int  # 0: any free port
    model: str
    engine: EngineConfig
    seed: int  # of the generated pseudo-words: replicas with the same seed generate the same text
    api_key: str | None
    max_queued_requests: int | None  # running and waiting; None: no limit
    auto_tools: bool
    task: Task = Task.GENERATE
    kv_events: KvEventsConfig | None = None  # None: no events are published
    role: Role | None = None  # None: no KV connector
    kv_transfer_rate: float = 200_000.0  # tokens/s
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE


def parse_settings(argv: Sequence[str]) -> ReplicaSettings:
    """Read the command line of ``python -m routing replica``; exits with a message if it is wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    capacity = (arguments.blocks - 1) * arguments.block_tokens
    max_model_len = min(MAX_MODEL_LEN, capacity) if arguments.max_model_len is None else arguments.max_model_len
    for name in ("prefill_rate", "block_tokens", "chunk", "max_running", "kv_transfer_rate"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if arguments.step_s < 0 or arguments.decode_s < 0:
        parser.error("--step-s and --decode-s must not be negative")
    if not 0 < arguments.kv_cache_metrics_sample <= 1:
        parser.error("--kv-cache-metrics-sample must be above 0 and at most 1")
    if not 1 < max_model_len <= capacity:
        reason = f"{capacity} tokens of KV cache (one block is never used)"
        parser.error(f"--max-model-len {max_model_len} does not fit: {reason}")
    engine = EngineConfig(
        blocks=arguments.blocks - 1,
        block_tokens=arguments.block_tokens,
        prefill_rate=arguments.prefill_rate,
        step_s=arguments.step_s,
        decode_s=arguments.decode_s,
        chunk_tokens=arguments.chunk,
        max_running=arguments.max_running,
        max_model_len=max_model_len,
        caches_prefixes=not arguments.no_enable_prefix_caching,
        block_sample_ratio=arguments.kv_cache_metrics_sample if arguments.kv_cache_metrics else 0.0,
    )
    names = {field.name for field in fields(ReplicaSettings)} - {"engine", "kv_events"}
    own: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    return ReplicaSettings(engine=engine, kv_events=_kv_events(parser, arguments.kv_events_config), **own)


def _kv_events(parser: argparse.ArgumentParser, text: str | None) -> KvEventsConfig | None:
    """The value of --kv-events-config, if it enables events."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.MsgspecError as error:
        parser.error(f"--kv-events-config: {error}")
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m routing replica", description="A stand-in for a vLLM 0.32 replica."
    )
    add = parser.add_argument
    add("--port", type=int, required=True, help="0 takes any free port; the port is printed")
    add("--host", default="127.0.0.1")
    add("--model", default="warmpath-demo", help="the served model's name (default %(default)s)")
    add("--blocks", type=int, default=DEFAULT_BLOCKS, help="KV blocks, one of them never used (default %(default)s)")
    add("--block-tokens", type=int, default=16, help="tokens per block (default %(default)s)")
    add("--prefill-rate", type=float, default=8000.0, help="tokens/s (default %(default)s)")
    add("--step-s", type=float, default=0.010, help="seconds of any step (default %(default)s)")
    add("--decode-s", type=float, default=0.0002, help="more seconds per decoding sequence (default %(default)s)")
    add("--chunk", type=int, default=2048, help="prefill tokens per step, at most (default %(default)s)")
    add("--max-running", type=int, default=256, help="sequences in one step (default %(default)s)")
    add("--max-model-len", type=int, help="tokens of prompt and output (default: the KV cache's size, up to 131072)")
    add(
        "--max-num-queued-reqs",
        type=int,
        dest="max_queued_requests",
        help="503 above this many running and waiting requests (default: no limit)",
    )
    add("--kv-cache-metrics", action="store_true", help="report how long sampled KV blocks live")
    add("--kv-cache-metrics-sample", type=float, default=0.01, help="share of the blocks (default %(default)s)")
    add("--no-enable-prefix-caching", action="store_true", help="reuse no KV blocks")
    add("--kv-events-config", help="JSON, as of vLLM: publish KV events (needs pyzmq)")
    add("--api-key", help="require this bearer token under /v1")
    add(
        "--enable-auto-tool-choice",
        action="store_true",
        dest="auto_tools",
        help="accept tool_choice auto, and generate text",
    )
    add("--task", type=Task, choices=list(Task), default=Task.GENERATE, help="endpoints (default %(default)s)")
    add("--role", type=Role, choices=list(Role), help="transfer KV blocks as vLLM with NixlConnector")
    add("--kv-transfer-rate", type=float, default=200_000.0, help="tokens/s (default %(default)s)")
    policies = list(LoadFailurePolicy)
    add("--kv-load-failure-policy", type=LoadFailurePolicy, choices=policies, default=policies[0], help="as of vLLM")
    add("--seed", type=int, default=0, help="seed of the generated pseudo-words (default %(default)s)")
    return parser


class Choice:
    """One output: its tokens are fixed from the start, and the engine decides when each is generated."""

    __slots__ = ("finish_reason", "generated", "index", "pieces", "sequence", "stop_reason")

    def __init__(self, index: int, pieces: list[str], stop_reason: str | None, sequence: EngineSequence) -> None:
        self.index = index
        self.pieces = pieces  # the text of each token
        self.stop_reason = stop_reason  # the stop string that ends it
        self.sequence = sequence
        self.generated = 0  # tokens
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text generated so far, without the stop string."""
        return "".join(self.pieces[: self.generated])


class Generation:
    """The choices of one request, submitted to the engine together and dropped together."""

    def __init__(self, request: GenerationRequest, words: PseudoWords, runtime: RealTimeEngine) -> None:
        self.request = request
        self._runtime = runtime
        self._words = words
        self.choices: list[Choice] = []
        for prompt in request.prompts:
            siblings = Siblings(request.n)
            for variant in range(request.n):
                self.choices.append(self._choice(prompt, variant, siblings))
        self.transfer_params: dict[str, Any] | None = None  # of the response
        self._unfinished = len(self.choices)
        self._ended = asyncio.Event()

    def _choice(self, prompt: bytes, variant: int, siblings: Siblings) -> Choice:
        config = self._runtime.engine.config
        earlier_tokens = self._words.generated_at_end(prompt)
        tokens, reason = self.request.output_length(prompt, variant, config.max_model_len, earlier_tokens)
        origin = prompt[: len(prompt) - earlier_tokens * TOKEN_BYTES]
        pieces = self._words.tokens(origin, earlier_tokens + tokens, variant)[earlier_tokens:]
        generated = "".join(pieces).encode()
        stop = None
        if self.request.stops:
            pieces, stop = cut_at_stop(pieces, self.request.stops)
            reason = reason if stop is None else "stop"
        sequence = EngineSequence(
            keys=block_keys(prompt + generated, config.block_tokens, self.request.salt),
            prompt_tokens=count_tokens(prompt),
            output_tokens=len(pieces),
            arrived_s=self._runtime.now(),
            finish_reason=reason,
            max_tokens=self.request.max_tokens,
            siblings=siblings,
            data=prompt + generated if self._runtime.engine.changes is not None else b"",
            salt=self.request.salt,
            reads_cache=self.request.reads_cache,
            external_tokens=self.request.external_tokens,
        )
        return Choice(len(self.choices), pieces, stop, sequence)

    async def run(self, on_progress: Callable[[Choice, int], None] | None = None) -> None:
        """Submit every choice and wait for all of them.

        ``on_progress`` gets a choice and its previous token count after each step, from inside the engine's timer.
        """
        for choice in self.choices:
            self._runtime.submit(choice.sequence, partial(self._advance, choice, on_progress))
        await self._ended.wait()

    def drop(self) -> None:
        """Abort the unfinished choices; also called if the client disconnected before any was submitted."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._runtime.abort(choice.sequence)

    def end(self) -> None:
        """Let ``run`` return even if choices are unfinished."""
        self._ended.set()

    def _advance(
        self,
        choice: Choice,
        on_progress: Callable[[Choice, int], None] | None,
        generated: int,
        finish_reason: str | None,
    ) -> None:
        before, choice.generated, choice.finish_reason = choice.generated, generated, finish_reason
        if on_progress is not None:
            on_progress(choice, before)
        if finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self.end()

    # --- usage ---

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(count_tokens(prompt) for prompt in self.request.prompts)

    @property
    def completion_tokens(self) -> int:
        """Generated so far, over all choices."""
        return sum(choice.generated for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, of the first choice of each prompt."""
        return sum(choice.sequence.cached_tokens or 0 for choice in self.choices[:: self.request.n])

    @property
    def created_cache_tokens(self) -> int:
        """Prompt tokens that this request added to the cache: whole blocks that were not cached yet."""
        block = self._runtime.engine.config.block_tokens
        return self.prompt_tokens // block * block - self.cached_tokens if len(self.request.prompts) == 1 else 0


def cut_at_stop(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    """The tokens up to the one that completes a stop string, and that string; the text ends before the string."""
    text = "".join(pieces)
    matches = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    if not matches:
        return pieces, None
    position, stop = min(matches)
    cut: list[str] = []
    start = 0
    for piece in pieces:
        cut.append(piece[: max(0, position - start)])
        start += len(piece)
        if start >= position + len(stop):
            break
    return cut, stop


class Replica:
    """The state that all HTTP handlers share. Create it on the loop that it will run on."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.engine = Engine(settings.engine)
        self.runtime = RealTimeEngine(self.engine, asyncio.get_running_loop())
        self.kv_events = None if settings.kv_events is None else self._publisher(settings.kv_events)
        self.transfers = (
            None if settings.role is None else Transfers(settings.kv_transfer_rate, settings.kv_load_failure_policy)
        )
        self.in_flight = 0  # HTTP requests for a generation
        self.fault: Fault = NoFault()
        self._words = PseudoWords(settings.seed)
        self._started_s = time.time()

    def _publisher(self, config: KvEventsConfig) -> KvEventPublisher:
        """Publish KV events from now on."""
        from routing.standin.kv_events import KvEventPublisher  # noqa: PLC0415 - needs pyzmq

        publisher = KvEventPublisher(config, self.settings.engine.block_tokens)
        self.engine.record_changes()
        self.runtime.on_planned = lambda: publisher.publish(self.engine.take_changes())
        return publisher

    def generate(self, request: GenerationRequest) -> Generation:
        """Create a generation, not yet started; ApiError if the queue is full or a fault rejects it."""
        if isinstance(self.fault, Refuse):
            raise ApiError(self.fault.status, "Service Unavailable", "The fault 'refuse' is active on this stand-in.")
        limit = self.settings.max_queued_requests
        if limit is not None and self.engine.outstanding >= limit:
            self.engine.statistics.rejected += 1
            raise queue_full()
        return Generation(request, self._words, self.runtime)

    @property
    def crash(self) -> CrashAfterChunks | None:
        """The fault that breaks streams, if it is active."""
        return self.fault if isinstance(self.fault, CrashAfterChunks) else None

    def set_fault(self, fault: Fault) -> None:
        """Replace the active fault."""
        self.fault = fault
        self.engine.slowdown = fault.factor if isinstance(fault, Slow) else 1.0
        should_pause = isinstance(fault, Hang)
        if should_pause and not self.runtime.is_paused:
            self.runtime.pause()
        elif not should_pause and self.runtime.is_paused:
            self.runtime.resume()

    def metrics_page(self) -> bytes:
        """The body of ``/metrics``."""
        return page(self.engine, self.settings.model, self._started_s)
