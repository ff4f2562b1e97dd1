"""What KV events bring: ``python -m tests.benchmarks event_gain``; the table of routing/kv_events/README.md.

1, 2 and 4 routers, with and without events, place two seeded workloads under ``lowest_cost`` before the same modelled
engines. Each request arrives at a random router. ``hit %``: cached tokens of all prompt tokens. ``over %``: share of
the requests of which at least one block more was predicted than delivered. ``error``: mean difference between predicted
and delivered cached tokens. The first 40 % of the requests fill the caches and are not counted. ``documents``:
questions about shared documents; ``conversations``: turns of conversations that share system prompts. Both are larger
than the caches.

Theory of operation. Time is virtual and everything is seeded, so a table is the same on every machine. Placement,
residency index and what events change there are the router's own; events reach it without sockets, at its next tick.
Clients send their next request as soon as they have a response.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, product
from random import Random
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.request import PlacementRequest
from routing.balancing.residency import Residency
from routing.kv_events.decoding import BlockRemoved, BlockStored, EncodedTokens, Event
from routing.kv_events.followed_engine import FollowedEngine
from routing.kv_events.known_prompts import KnownPrompts
from routing.kv_events.subscriptions import TICK_S
from routing.prompt.canonical import canonical_prompt
from routing.prompt.parsing import parse_body
from routing.schema import LowestCostSettings, PolicyConfig, PoolConfig, ReplicaConfig, RouterConfig
from routing.simulation.engine import CacheChange, Engine, EngineConfig, StoredBlocks
from routing.simulation.engine import Sequence as EngineSequence
from routing.standin.requests import TOKEN_BYTES, PseudoWords, block_keys, count_tokens, encode, render_chat, token_ids
from routing.types import TargetId

REPLICAS = 3
BLOCKS = 1500  # of each replica
BLOCK_TOKENS = 16
ENGINE = EngineConfig(blocks=BLOCKS, block_tokens=BLOCK_TOKENS, prefill_rate=100_000.0, step_s=0.002)
NETWORK_S = 0.0005  # in each direction
ROUTERS = (1, 2, 4)
REQUESTS = 400
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)
CONCURRENCY = 8
SKIP = 0.4  # share of the requests, from the start, that is not counted
DOCUMENTS, DOCUMENT_BYTES, QUESTION_BYTES = 40, (4000, 12_000), (100, 600)
CONVERSATIONS, SYSTEMS, SYSTEM_BYTES, TURN_BYTES, MAX_BYTES = 60, 4, 2000, (200, 1000), 5000
OUTPUT_TOKENS = (8, 64)
PATH = "/v1/chat/completions"

Messages = list[dict[str, str]]


class Texts:
    """Seeded words of different lengths, so that tokens per byte vary."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._words = ["".join(self._random.choices("etaoinshrdlu", k=self._random.randint(2, 9))) for _ in range(500)]

    def passage(self, sizes: tuple[int, int]) -> str:
        size = self._random.randint(*sizes)
        return " ".join(self._random.choices(self._words, k=size // 3))[:size]


class Workload(Protocol):
    """Hands out the next messages of a client, and gets the response."""

    def next(self) -> Messages: ...

    def on_response(self, messages: Messages, text: str) -> None: ...


def weights(items: int) -> list[float]:
    """Some are requested often and most rarely."""
    return [(1 + number) ** -0.6 for number in range(items)]


class Documents:
    """Questions about documents."""

    def __init__(self, seed: int) -> None:
        self._random, self._texts = Random(seed), Texts(seed)
        self._documents = [self._texts.passage(DOCUMENT_BYTES) for _ in range(DOCUMENTS)]

    def next(self) -> Messages:
        (document,) = self._random.choices(self._documents, weights(DOCUMENTS))
        return [{"role": "user", "content": f"{document}\n\n{self._texts.passage(QUESTION_BYTES)}"}]

    def on_response(self, messages: Messages, text: str) -> None:
        """Nothing follows."""


class Conversations:
    """Conversations that grow turn by turn; one that is too long is replaced by a new one."""

    def __init__(self, seed: int) -> None:
        self._random, self._texts = Random(seed), Texts(seed)
        self._systems = [self._texts.passage((SYSTEM_BYTES, SYSTEM_BYTES)) for _ in range(SYSTEMS)]
        self._idle = {number: self._new(number) for number in range(CONVERSATIONS)}
        self._busy: dict[int, int] = {}  # number of a conversation, by the id of its messages

    def _new(self, number: int) -> Messages:
        return [{"role": "system", "content": self._systems[number % SYSTEMS]}]

    def next(self) -> Messages:
        by_number = weights(CONVERSATIONS)
        (number,) = self._random.choices(list(self._idle), [by_number[number] for number in self._idle])
        messages = self._idle.pop(number)
        if sum(len(message["content"]) for message in messages) > SYSTEM_BYTES + MAX_BYTES:
            messages = self._new(number)
        messages.append({"role": "user", "content": self._texts.passage(TURN_BYTES)})
        self._busy[id(messages)] = number
        return messages

    def on_response(self, messages: Messages, text: str) -> None:
        messages.append({"role": "assistant", "content": text})
        self._idle[self._busy.pop(id(messages))] = messages


WORKLOADS: dict[str, Callable[[int], Workload]] = {"documents": Documents, "conversations": Conversations}


class Cell(NamedTuple):
    """Figures of one row."""

    hit_ratio: float
    over_ratio: float
    error_tokens: float
    matched_ratio: float  # responses whose blocks were found among the events


class Response(NamedTuple):
    """What was predicted of a request and what was delivered, in the engine's tokens."""

    number: int
    prompt_tokens: int
    predicted_tokens: float
    cached_tokens: int


class Running(NamedTuple):
    """A request in progress."""

    number: int
    messages: Messages
    text: str  # of the response
    hit_ratio: float  # predicted
    ticket: Ticket


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks event_gain")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args(arguments)
    for line in lines_of(options.requests, options.seeds):
        print(line, flush=True)


def lines_of(requests: int, seeds: Sequence[int]) -> Iterator[str]:
    """The table, in Markdown; figures are means over the seeds."""
    yield "| workload | routers | events | hit % | over % | error, tokens |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, routers, follows in product(WORKLOADS, ROUTERS, (False, True)):
        cells = [cell(name, routers, follows, requests, seed) for seed in seeds]
        hit, over, error, _ = (sum(figures) / len(cells) for figures in zip(*cells, strict=True))
        row = f"{100 * hit:.1f} | {100 * over:.0f} | {error:.0f}"
        yield f"| {name} | {routers} | {'yes' if follows else 'no'} | {row} |"


def cell(workload: str, routers: int, follows: bool, requests: int, seed: int) -> Cell:
    """Serve one workload through new routers and new engines."""
    fleet = Fleet(WORKLOADS[workload](seed), routers, follows, seed)
    counted = [response for response in fleet.serve(requests) if response.number >= int(requests * SKIP)]
    differences = [response.predicted_tokens - response.cached_tokens for response in counted]
    prompt, cached = (sum(column) for column in list(zip(*counted, strict=True))[1::2])
    over = sum(difference >= BLOCK_TOKENS for difference in differences)
    matched = sum(engine.matched for router in fleet.routers for engine in router.followed)
    return Cell(cached / prompt, over / len(counted), sum(map(abs, differences)) / len(counted), matched / requests)


class Router:
    """A router without connections."""

    def __init__(self, seed: int, clock: Callable[[], float], *, follows: bool) -> None:
        member = ReplicaConfig(name="replica", url="http://modelled", block_tokens=BLOCK_TOKENS, capacity_blocks=BLOCKS)
        members = tuple([replace(member, name=f"replica-{number}") for number in range(REPLICAS)])
        policy = PolicyConfig(name="bench", revision=1, settings=LowestCostSettings())
        pool = PoolConfig(name="bench", policy=policy, replicas=members)
        self.residency, self.health = Residency(), HealthRegistry()
        self.placement = Placement(
            RouterConfig(hash_secret="0" * 32, pools=(pool,)), LoadTracker(clock), seed, self.residency
        )
        self.targets = [TargetId(member.name) for member in members]
        self.followed: list[FollowedEngine] = []  # in the order of the replicas; empty: no events are followed
        self.received: list[tuple[int, float, list[Event]]] = []  # replica, time and events of messages to apply
        self._clock = clock
        if follows:
            self._follow()

    def _follow(self) -> None:
        known = KnownPrompts()
        for target in self.targets:
            engine = FollowedEngine(target, self.residency, known, self._clock, 1 << 18)
            self.residency.add_replica(target, BLOCKS * BLOCK_TOKENS)
            engine.restart()
            self.followed.append(engine)
        self.tick()

    def tick(self) -> None:
        """Apply what was received, and learn from responses."""
        received, self.received = self.received, []
        for number, at_s, events in received:
            for _ in self.followed[number].apply(events, self._clock() - at_s):
                pass
        for engine in self.followed:
            if (replica := self.residency.replica(engine.target)) is not None:
                replica.on_response, replica.expires = engine.on_response, not engine.blocks.is_complete
            self.residency.set_seen_tokens(engine.target, engine.seen_tokens, was_full=engine.was_full)
            for keys in engine.learn():
                for other in self.followed:
                    if other is not engine:
                        other.add_longest_cached(keys)


class Fleet:
    """Routers, engines and clients in virtual time."""

    def __init__(self, workload: Workload, routers: int, follows: bool, seed: int) -> None:
        self.now_s = 0.0
        self.routers = [Router(number, lambda: self.now_s, follows=follows) for number in range(routers)]
        self._engines = [Engine(ENGINE) for _ in range(REPLICAS)]
        self._is_busy = [False] * REPLICAS
        self._workload, self._follows = workload, follows
        self._chance, self._words = Random(seed), PseudoWords(seed)
        self._numbers: Iterator[int] = iter(())
        self._running: dict[EngineSequence, Running] = {}
        self._responses: list[Response] = []
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []  # heap
        self._serials = count()
        for engine in self._engines:
            engine.record_changes()

    def serve(self, requests: int) -> list[Response]:
        """Serve so many requests."""
        self._numbers = iter(range(requests))
        for client in range(CONCURRENCY):
            self._at(client * NETWORK_S, self._send)
        for number, router in enumerate(self.routers if self._follows else ()):
            self._at(TICK_S * (number + 1) / len(self.routers), self._tick, router)
        while len(self._responses) < requests:
            self.now_s, _, action, arguments = heappop(self._due)
            action(*arguments)
        return self._responses

    def _at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:
        heappush(self._due, (at_s, next(self._serials), action, arguments))

    def _tick(self, router: Router) -> None:
        router.tick()
        self._at(self.now_s + TICK_S, self._tick, router)

    def _send(self) -> None:
        """A client sends its next request, if any are left."""
        number = next(self._numbers, None)
        if number is None:
            return
        messages, router = self._workload.next(), self._chance.choice(self.routers)
        parsed = parse_body(PATH, json.dumps({"model": "tiny", "messages": messages}).encode())
        request = PlacementRequest(parsed.model, None, None, canonical_prompt(parsed))
        decision = router.placement.decide(request, router.health)
        ticket = router.placement.dispatch(decision)
        prompt = encode(render_chat(messages))
        text = "".join(self._words.tokens(prompt, self._chance.randint(*OUTPUT_TOKENS)))
        data = prompt + encode(text.encode())
        tokens = count_tokens(prompt)
        keys = block_keys(data, BLOCK_TOKENS)
        sequence = EngineSequence(keys, tokens, count_tokens(data) - tokens, self.now_s, data=data)
        hit_ratio = min(1.0, (decision.choice.hit_tokens or 0) / decision.keys.prompt_tokens)
        self._running[sequence] = Running(number, messages, text, hit_ratio, ticket)
        self._at(self.now_s + NETWORK_S, self._submit, router.targets.index(decision.choice.target), sequence)

    def _submit(self, number: int, sequence: EngineSequence) -> None:
        self._engines[number].submit(sequence)
        if not self._is_busy[number]:
            self._begin(number)

    def _begin(self, number: int) -> None:
        """The engine plans a step and publishes what that changes in its cache."""
        engine = self._engines[number]
        step = engine.plan_step(self.now_s)
        changes = engine.take_changes()
        for router in self.routers if changes and self._follows else ():
            router.received.append((number, self.now_s, list(events_of(changes))))
        self._is_busy[number] = step is not None
        if step is not None:
            self._at(step.end_s, self._finish, number, step)

    def _finish(self, number: int, step: Any) -> None:
        result = self._engines[number].finish(step)
        for sequence in result.first:
            self._at(self.now_s + NETWORK_S, self._running[sequence].ticket.record_first_byte)
        for sequence in result.finished:
            self._at(self.now_s + NETWORK_S, self._respond, sequence)
        self._begin(number)

    def _respond(self, sequence: EngineSequence) -> None:
        """The response is complete; the client sends its next request."""
        running, tokens, cached = self._running.pop(sequence), sequence.prompt_tokens, sequence.cached_tokens or 0
        ttft_s = (sequence.first_token_s or self.now_s) - sequence.arrived_s
        running.ticket.record_response(ttft_s, tokens, cached, sequence.generated_tokens)
        running.ticket.end()
        self._workload.on_response(running.messages, running.text)
        self._responses.append(Response(running.number, tokens, running.hit_ratio * tokens, cached))
        self._at(self.now_s + NETWORK_S, self._send)


def events_of(changes: Sequence[CacheChange]) -> Iterator[Event]:
    """The events of one step, as a router decodes them."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    for change in changes:
        if isinstance(change, int):
            yield BlockRemoved([change], "GPU")
        elif isinstance(change, StoredBlocks):
            hashes = [key for key in change.keys if key is not None]
            ids = token_ids(change.data[change.first * size : (change.first + len(hashes)) * size])
            tokens = EncodedTokens(msgspec.msgpack.encode(ids))
            yield BlockStored(hashes, change.parent, tokens, BLOCK_TOKENS, medium="GPU")
