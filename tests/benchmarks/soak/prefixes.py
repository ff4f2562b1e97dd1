"""Memory of a router under an unbounded number of distinct prefixes.

Calls the router's objects directly, without HTTP, which would take ten times as long: body -> canonical prompt ->
hashes -> choice -> load tracker and residency -> decision record -> counters. A prompt has ``BLOCKS`` blocks, each
the end of another prefix, so ``prefixes`` take an eighth as many prompts; each also names a new session and task
group. Time is virtual, a millisecond per prompt. Memory rises and falls with table resizing, so its maximum in the
first quarter after the warm-up is compared with that in the last.
"""

from __future__ import annotations

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.request import PlacementRequest
from routing.balancing.residency import MAX_ENTRIES, Residency
from routing.http.usage import Usage
from routing.observability.decision_log import MAX_RECORDS, DecisionRing, Record
from routing.observability.metrics import Metrics, Outcome
from routing.process import return_large_blocks, tune_garbage_collector
from routing.prompt.canonical import canonical_prompt
from routing.prompt.parsing import parse_body, session_key
from routing.schema import LowestCostSettings, PolicyConfig, PoolConfig, ReplicaConfig, RouterConfig
from routing.types import BLOCK_TOKENS
from tests.benchmarks.soak.stand import resident_kib
from tests.benchmarks.soak.verdict import Verdict

PATH = "/v1/chat/completions"
REPLICAS = 8
BLOCKS = 8  # of a prompt
PROMPT_TOKENS = BLOCKS * BLOCK_TOKENS
CAPACITY_BLOCKS = 2_000_000  # of 16 tokens: large enough that MAX_ENTRIES is the limit
SAMPLES = 40
WARM_UP = MAX_ENTRIES + MAX_ENTRIES // 4  # prompts; then the index is full and evicts entries

FILLER = b"x" * (4 * PROMPT_TOKENS)


class RouterState:
    def __init__(self, residency: Residency | None = None) -> None:
        members = tuple(
            ReplicaConfig(name=f"gpu-{number}", url="http://replica", block_tokens=16, capacity_blocks=CAPACITY_BLOCKS)
            for number in range(REPLICAS)
        )
        policy = PolicyConfig(name="soak", revision=1, settings=LowestCostSettings())
        pool = PoolConfig(name="soak", policy=policy, replicas=members)
        self.now_s = 0.0
        self.load_tracker = LoadTracker(clock=lambda: self.now_s)
        self.residency = Residency() if residency is None else residency
        self.metrics = Metrics()
        self.decisions = DecisionRing()
        self._health = HealthRegistry()
        config = RouterConfig(hash_secret="0" * 32, pools=(pool,))
        self._placement = Placement(config, self.load_tracker, residency=self.residency)

    def serve(self, number: int) -> None:
        """A whole request, from its body to the end of its accounting."""
        self.now_s += 0.001
        parsed = parse_body(PATH, _body(number))
        request = PlacementRequest(parsed.model, f"group-{number}", session_key(parsed), canonical_prompt(parsed))
        decision = self._placement.decide(request, self._health)
        record = Record.from_decision(decision, f"id-{number}")
        ticket = self._placement.dispatch(decision)
        ticket.record_first_byte()
        record.status, record.is_streamed = 200, True
        record.ttft_s = 0.05
        record.add_usage(Usage(PROMPT_TOKENS, 16, 0))
        ticket.record_response(0.05, PROMPT_TOKENS, 0)
        ticket.end()
        self.metrics.count_placed(record, Outcome.OK)
        self.decisions.add(record)

    @property
    def series(self) -> int:
        return sum(1 for _ in self.metrics.lines())


def _body(number: int) -> bytes:
    text = b"%d %b" % (number, FILLER[: 4 * PROMPT_TOKENS - 24])
    return b'{"model":"llama","user":"u-%d","messages":[{"role":"user","content":"%b"}]}' % (number, text)


def measure(verdict: Verdict, prefixes: int) -> None:
    return_large_blocks()
    tune_garbage_collector()
    state, prompts = RouterState(), max(1, prefixes // BLOCKS)
    warm_up = min(prompts // 2, WARM_UP)
    for number in range(warm_up):
        state.serve(number)
    series, max_entries, samples_kib = state.series, 0, list[int]()
    step = max(1, (prompts - warm_up) // SAMPLES)
    for first in range(warm_up, prompts, step):
        for number in range(first, min(first + step, prompts)):
            state.serve(number)
        max_entries = max(max_entries, len(state.residency))
        samples_kib.append(resident_kib())
    quarter = SAMPLES // 4
    verdict.report("prompts", f"{prompts:,} of {BLOCKS} blocks: {prompts * BLOCKS:,} prefixes, without HTTP")
    verdict.check_memory(max(samples_kib[:quarter]), max(samples_kib[-quarter:]))
    verdict.check("index", f"{max_entries:,} entries at most, limit {MAX_ENTRIES:,}", 0 < max_entries <= MAX_ENTRIES)
    verdict.check(
        "decisions", f"{len(state.decisions):,} kept, limit {MAX_RECORDS:,}", len(state.decisions) <= MAX_RECORDS
    )
    verdict.check("series", f"{series} lines after the warm-up, {state.series} at the end", series == state.series)
    verdict.check(
        "loads",
        "all requests ended" if not state.load_tracker.audit() else str(state.load_tracker.audit()),
        not state.load_tracker.audit(),
    )
