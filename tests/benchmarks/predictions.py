"""Predicted against delivered cached tokens of real replicas: ``python -m tests.benchmarks predictions --replica
URL``.

Conversations that share a few system prompts grow turn by turn and together exceed the caches. A router of this
checkout places them under ``lowest_cost``; its decisions have the prediction, and the replicas' usage the cached
tokens. Texts are of several kinds (Python's reference manual, its standard library, JSON, other scripts), so tokens per
byte vary. Start the replicas with small caches and with ``--enable-prompt-tokens-details``. The first ``--skip`` share
of the requests fills the caches and is not counted. With ``--routers`` each request goes to a random router; with
``--events`` the routers follow the replicas' KV events, which the replicas report at ``/kv_event_sources``. Incidents
can be played while the clients go on: ``--flood COUNT`` sends so many other prompts after half of the requests,
``--reset`` clears the prefix cache of the first replica at 65 % (needs ``VLLM_SERVER_DEV_MODE=1``), ``--restart
COMMAND`` runs a shell command at 80 % that restarts the first replica and waits until it is ready. Responses that were
in progress while the cache was cleared are not counted: what was predicted for them was cached when they were sent.
Fails if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx

from routing.schema import KvEvents, LowestCostSettings, ReplicaConfig
from tests.benchmarks.router import serving_router

DEADLINE_S = 120.0  # of one request
KINDS = ("prose", "code", "json", "mixed")
SYSTEM_BYTES = 2000
TURN_BYTES = (200, 1000)
MAX_BYTES = 5000  # of a conversation; after that a new one replaces it
OUTPUT_TOKENS = (8, 64)
GOAL_POINTS, GOAL_OVER, GOAL_OVER_WITH_EVENTS = 2.0, 0.03, 0.01
FLOOD_AT, RESET_AT, RESTART_AT = 0.5, 0.65, 0.8  # shares of the requests
FLOOD = "flood-"  # ids of its requests begin so
Ports = tuple[int, int]  # data port, admin port


@dataclass
class Conversation:
    """One conversation and the source of its messages."""

    kind: str
    messages: list[dict[str, str]]
    bytes: int = 0
    is_busy: bool = False

    def drop_last(self) -> None:
        """Withdraw the message that got no response."""
        text = self.messages.pop()["content"]
        self.bytes -= len(text.encode())
        self.is_busy = False


@dataclass
class Figures:
    """Sums over the counted responses, in the engines' tokens."""

    responses: int = 0
    failed: int = 0  # requests without a whole response
    during_reset: int = 0  # responses that were in progress while the cache was cleared
    prompt: int = 0
    predicted: int = 0
    cached: int = 0
    over: int = 0  # predicted and not delivered, request by request
    over_responses: int = 0  # of which a block more was predicted than delivered
    ratios: list[float] = field(default_factory=list)  # estimated / reported prompt tokens

    def add(self, record: dict[str, Any], block_tokens: int) -> None:
        """Count one decision; skip it without a prediction or reported usage."""
        hit, prompt, cached = record["hit_tokens"], record["prompt_tokens"], record["cached_tokens"]
        if hit is None or prompt is None or cached is None:
            return
        predicted = min(prompt, hit)
        self.responses += 1
        self.prompt += prompt
        self.cached += cached
        self.predicted += predicted
        self.over += max(0, predicted - cached)
        self.over_responses += predicted - cached >= block_tokens
        self.ratios.append(record["prompt_tokens_estimate"] / prompt)

    @property
    def points(self) -> float:
        """Predicted minus delivered, in percentage points of the prompt tokens."""
        return 100 * (self.predicted - self.cached) / self.prompt

    @property
    def over_ratio(self) -> float:
        """Share of the predicted tokens that was not delivered."""
        return self.over / self.predicted


def main(argv: Sequence[str] = ()) -> None:
    options = _options(argv)
    _report(measure(argv), GOAL_OVER_WITH_EVENTS if options.events else GOAL_OVER)


def measure(argv: Sequence[str]) -> Figures:
    """Run the workload through a router and compare its predictions."""
    options = _options(argv)
    members = tuple([_replica(f"replica-{n}", url, options.events) for n, url in enumerate(options.replica)])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names, workers = (f"router-{number}" for number in range(options.routers)), f"--workers={options.workers}"
        started = [
            stack.enter_context(serving_router(folder, name, members, LowestCostSettings(), None, workers))
            for name in names
        ]
        routers = [(router.port, router.admin_port or 0) for router in started]
        records, generated, reset = asyncio.run(_play(routers, options))
    if options.out:
        options.out.write_text(json.dumps({"records": records, "generated": generated}))
    figures = Figures(failed=sum(tokens is None for tokens in generated.values()))
    for record in records[int(len(records) * options.skip) :]:
        if reset is not None and reset.overlaps(record):
            figures.during_reset += 1
        else:
            figures.add(record, members[0].block_tokens)
    return figures


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks predictions", description=__doc__)
    add = parser.add_argument
    add("--replica", action="append", required=True, metavar="URL", help="a running replica; once for each")
    add("--model", help="model that requests name (default: the first replica's)")
    add("--requests", type=int, default=400)
    add("--conversations", type=int, default=40, help="concurrent conversations")
    add("--concurrency", type=int, default=4)
    add("--workers", type=int, default=1, help="processes of each router")
    add("--routers", type=int, default=1, help="routers; each request goes to a random one")
    add("--events", action="store_true", help="follow the replicas' KV events")
    add("--flood", type=int, default=0, metavar="COUNT", help="prompts of a flood, which are not counted")
    add("--reset", action="store_true", help="clear the prefix cache of the first replica")
    add("--restart", metavar="COMMAND", help="shell command that restarts the first replica")
    add("--skip", type=float, default=0.4, help="share of the requests, from the start, that is not counted")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="file for the router's decisions, as JSON")
    return parser.parse_args(argv)


def _report(figures: Figures, goal_over: float) -> None:
    if not figures.prompt or not figures.predicted:
        raise SystemExit("no response reported cached tokens: does the engine report prompt_tokens_details?")
    predicted, cached = 100 * figures.predicted / figures.prompt, 100 * figures.cached / figures.prompt
    over = 100 * figures.over_ratio
    ratios = sorted(figures.ratios)
    low, median, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.05, 0.5, 0.95))
    print(f"responses counted               {figures.responses}, {figures.prompt:,} prompt tokens")
    print(f"requests failed                 {figures.failed}")
    if figures.during_reset:
        print(f"not counted, during the reset   {figures.during_reset}")
    print(f"predicted cached                {predicted:.1f} % of prompt tokens")
    print(f"delivered cached                {cached:.1f} %")
    print(f"difference                      {figures.points:+.1f} points (goal: at most {GOAL_POINTS:g})")
    print(f"over-predicted                  {over:.1f} % of predicted tokens (goal: at most {goal_over:.0%})")
    print(f"responses with a block too much {100 * figures.over_responses / figures.responses:.1f} %")
    print(f"estimated / reported prompt     {median:.2f} (5 % below {low:.2f}, 5 % above {high:.2f})")
    if abs(figures.points) > GOAL_POINTS or figures.over_ratio > goal_over:
        raise SystemExit("a goal was missed")


# --- the workload ------------------------------------------------------------------------------------


class Texts:
    """Seeded passages of several kinds with different tokens per byte."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        letters = [chr(code) for code in (*range(0x3B1, 0x3C9), *range(0x430, 0x450))]
        prose = "\n".join(text for _, text in sorted(topics.items()))
        self._sources = {
            "prose": prose,
            "code": "\n".join(map(inspect.getsource, (argparse, inspect, json, tempfile))),
            "json": json.dumps([{"id": n, "load": self._random.random(), "up": n % 3 > 0} for n in range(4000)]),
            "mixed": " ".join(
                self._foreign_word(letters) if n % 8 == 7 else word for n, word in enumerate(prose.split())
            ),
        }

    def _foreign_word(self, letters: Sequence[str]) -> str:
        return "".join(self._random.choices(letters, k=self._random.randint(2, 9)))

    def passage(self, kind: str, size: int) -> str:
        source = self._sources[kind]
        start = self._random.randrange(len(source) - size)
        return source[start : start + size]


class Workload:
    """Conversations; the next turn belongs to a random one, some often and most rarely."""

    def __init__(self, seed: int, count: int) -> None:
        self._texts = Texts(seed)
        self._random = random.Random(seed + 1)
        self._systems = {kind: self._texts.passage(kind, SYSTEM_BYTES) for kind in KINDS}
        self.conversations = [self._new(number) for number in range(count)]

    def _new(self, number: int) -> Conversation:
        kind = KINDS[number % len(KINDS)]
        return Conversation(kind, [{"role": "system", "content": self._systems[kind]}])

    def next(self) -> Conversation:
        """An idle conversation with a further user message."""
        weights = [0.0 if talk.is_busy else 1.0 / (1 + n) ** 0.6 for n, talk in enumerate(self.conversations)]
        (number,) = self._random.choices(range(len(weights)), weights)
        chosen = self.conversations[number]
        if chosen.bytes > MAX_BYTES:
            chosen = self.conversations[number] = self._new(number)
        text = self._texts.passage(chosen.kind, self._random.randint(*TURN_BYTES))
        chosen.messages.append({"role": "user", "content": text})
        chosen.bytes += len(text.encode())
        chosen.is_busy = True
        return chosen

    def on_response(self, conversation: Conversation, text: str) -> None:
        conversation.messages.append({"role": "assistant", "content": text})
        conversation.bytes += len(text.encode())
        conversation.is_busy = False

    def output_tokens(self) -> int:
        return self._random.randint(*OUTPUT_TOKENS)


@dataclass(frozen=True)
class Span:
    """Two times, as Unix seconds."""

    start: float
    end: float

    def overlaps(self, record: dict[str, Any]) -> bool:
        """Whether a request was in progress at any time between the two."""
        sent = datetime.fromisoformat(record["at"]).timestamp()
        return sent <= self.end and sent + (record["latency_s"] or 0.0) >= self.start


async def _play(
    routers: Sequence[Ports], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, int | None], Span | None]:
    """(decisions in order, generated tokens by request id, when the cache was cleared)."""
    workload, generated = Workload(options.seed, options.conversations), dict[str, int | None]()
    left, chosen = iter(range(options.requests)), random.Random(options.seed)
    async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http:
        model = options.model or (await http.get(f"{options.replica[0]}/v1/models")).json()["data"][0]["id"]
        incidents = _Incidents(http, options, [data for data, _ in routers], model)

        async def client() -> None:
            for number in left:
                name = f"prediction-{number}"
                await incidents.before(number)
                generated[name] = await _turn(http, chosen.choice(routers)[0], workload, model, name)

        admins = [admin for _, admin in routers]
        decisions = asyncio.create_task(_collect_decisions(http, admins, options.requests))
        await asyncio.gather(*(client() for _ in range(options.concurrency)))
        async with asyncio.timeout(DEADLINE_S):
            return await decisions, generated, incidents.reset


class _Incidents:
    """Causes the chosen incidents. One client waits for each; the other clients go on."""

    def __init__(
        self, http: httpx.AsyncClient, options: argparse.Namespace, data_ports: Sequence[int], model: str
    ) -> None:
        self._http, self._options, self._data_ports, self._model = http, options, data_ports, model
        self.reset: Span | None = None

    async def before(self, number: int) -> None:
        """Cause the incident that is due before this request."""
        options = self._options
        if options.flood and number == int(FLOOD_AT * options.requests):
            await self._flood()
        if options.reset and number == int(RESET_AT * options.requests):
            await self._reset()
        if options.restart and number == int(RESTART_AT * options.requests):
            process = await asyncio.create_subprocess_shell(options.restart)
            assert await process.wait() == 0, f"{options.restart!r} failed"

    async def _flood(self) -> None:
        texts, flood = Texts(self._options.seed + 2), Workload(self._options.seed + 2, 1)
        for number in range(self._options.flood):
            text = texts.passage(KINDS[number % len(KINDS)], MAX_BYTES)
            flood.conversations = [Conversation("prose", [{"role": "user", "content": f"{number} {text}"}])]
            port = self._data_ports[number % len(self._data_ports)]
            await _turn(self._http, port, flood, self._model, f"{FLOOD}{number}")

    async def _reset(self) -> None:
        """Engines with running requests refuse, unless they may preempt them."""
        url = f"{self._options.replica[0]}/reset_prefix_cache?reset_running_requests=true"
        started = time.time()
        async with asyncio.timeout(DEADLINE_S):
            while not (await self._http.post(url)).raise_for_status().json()["success"]:
                await asyncio.sleep(0.01)
        self.reset = Span(started, time.time())


async def _turn(http: httpx.AsyncClient, port: int, workload: Workload, model: str, name: str) -> int | None:
    """One request and its response; generated tokens, None if it failed."""
    conversation = workload.next()
    body = {
        "model": model,
        "messages": conversation.messages,
        "max_tokens": workload.output_tokens(),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url, pieces, usage = f"http://127.0.0.1:{port}/v1/chat/completions", [], None
    try:
        async with http.stream("POST", url, json=body, headers={"X-Request-Id": name}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                pieces += [choice["delta"].get("content") or "" for choice in event.get("choices", ())]
                usage = event.get("usage") or usage
    except httpx.HTTPError:
        usage = None
    if usage is None:
        conversation.drop_last()
        return None
    workload.on_response(conversation, "".join(pieces))
    return usage["completion_tokens"]  # type: ignore[no-any-return]


async def _collect_decisions(http: httpx.AsyncClient, admins: Sequence[int], count: int) -> list[dict[str, Any]]:
    """All decisions of the routers in order of time, before their ring buffers drop them."""
    decisions: list[dict[str, Any]] = []
    after = dict.fromkeys(admins, 0)
    while len(decisions) < count:
        for admin in admins:
            url = f"http://127.0.0.1:{admin}/admin/decisions?after={after[admin]}&limit=500"
            page = (await http.get(url)).raise_for_status().json()["decisions"]
            decisions += [decision for decision in page if not decision["request_id"].startswith(FLOOD)]
            after[admin] = page[-1]["seq"] if page else after[admin]
        await asyncio.sleep(0.5)
    return sorted(decisions, key=lambda record: str(record["at"]))


# --- replicas ----------------------------------------------------------------------------------------


def _replica(name: str, url: str, with_events: bool) -> ReplicaConfig:
    """A replica with the capacity of its ``/metrics``; vLLM's null block holds nothing."""
    page = httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).raise_for_status().text
    labels = dict(
        re.findall(r'(\w+)="([^"]*)"', next(line for line in page.splitlines() if "cache_config_info{" in line))
    )
    blocks, tokens = int(labels["num_gpu_blocks"]) - 1, int(labels["block_size"])
    print(f"{name}: {url}, {blocks} blocks of {tokens} tokens")
    events = _events(url) if with_events else None
    return ReplicaConfig(name=name, url=url, block_tokens=tokens, capacity_blocks=blocks, kv_events=events)


def _events(url: str) -> KvEvents:
    """Where the first rank of a replica on this host publishes its KV events."""
    source = httpx.get(f"{url}/kv_event_sources", timeout=10.0, trust_env=False).raise_for_status().json()["0"]
    local = {name: source[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")}
    return KvEvents(**local, topic=source["topic"])
