"""Placement: a configuration, prepared to choose replicas for requests, and its decisions.

Theory of operation. Everything that follows from a configuration alone is computed here once: pools by model, and the
routes of each pool and task group (``routes.py``). A router replaces its whole placement between two requests; loads
and health are kept outside and carry over. ``decide`` does all that happens to a request before it is sent, and also
serves ``/admin/explain``, so explanations and placements agree.

``preferred_replicas`` tells warm-ups which replicas will get a prefix: the first in its ring order, as many as the
strategy's ``preferred_count``.

A decision holds where a request goes and why, the keys of the request, and loads and costs of the candidates.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

from routing.balancing.candidates import Candidates, Choice
from routing.balancing.disaggregation import PrefillTarget
from routing.balancing.load_tracker import Load, LoadTracker, Ticket, TokenRatio, TokenRatios, models_of
from routing.balancing.replicas import HealthRegistry, Target, targets_of
from routing.balancing.request import MatchedGroup, Models, PlacementRequest, ServedModel, TaskGroupMatcher
from routing.balancing.residency import Residency
from routing.balancing.routes import CanaryVerdict, Route, RouteBuilder, carry_over, uses_residency
from routing.balancing.strategies.strategy import Estimate, Keys, MediaKey
from routing.balancing.warm_up_prefixes import PrefixKey, WarmUpPrompt
from routing.prompt.hashing import PrefixHasher, boundary_end
from routing.prompt.structure import PromptStructure, describe_structure
from routing.schema import (
    PolicyConfig,
    ReplicaConfig,
    ReplicaState,
    RouterConfig,
    Tier1,
)
from routing.types import BLOCK_BYTES, BLOCK_TOKENS, MatchedBy, NoReplicaError, PrefixHash, Reason, ReplicaId, TargetId

UNCACHED_MASK: Final = 0x5851_F42D_4C95_7F2D  # makes the key of a prompt different from all hashes of blocks


class RequestKeys:
    """The keys of one request, for its placement and its decision record."""

    def __init__(
        self,
        request: PlacementRequest,
        served: ServedModel,
        hasher: PrefixHasher,
        rule: Tier1,
        ratio: TokenRatio,
    ) -> None:
        prompt, session_key, tenant = request.prompt, request.session_key, request.tenant
        self._request = request
        self._served = served
        self._hasher = hasher
        self._rule = rule
        self.ratio = ratio  # of the pool's model; it may change while the request runs
        self.block_tokens = BLOCK_TOKENS if prompt.ids else ratio.block_tokens  # estimated, or exact for token ids
        # Estimated length of the prompt, by the model's mean ratio alone; and with ``add_surplus``.
        self.estimate = self.prompt_tokens = prompt.estimate(ratio.block_tokens)
        self.hash_tokens = self.block_tokens  # estimated tokens of a block of this prompt, with ``add_surplus``
        # Key of the session, different for each tenant; None if the request has none.
        self.session: PrefixHash | None = None
        if session_key:
            self.session = hasher.session(f"{tenant} {session_key}" if tenant else session_key)
        self.conversation = self.session if request.is_conversation else None  # if it names one, as a header does
        # Key of the tier-1 prefix; None if that is empty.
        self.tier1 = hasher.tier1(prompt, served.model, rule, served.adapter)
        # Chained block hashes of the prompt, in shared chunks.
        self.blocks = hasher.chunks(prompt, served.model, served.adapter)
        # The same in one array: as the engine stores them, and as it finds them; those of no replica if it reads none.
        self.stored_chain = self.chain = array("Q", b"".join(self.blocks))
        self.reads_cache = prompt.reads_cache  # whether the engine uses cached blocks for the prompt
        self.sample_bytes = prompt.sample_bytes  # if the prompt is a usable sample for the ratio, else 0
        if self.chain and not self.reads_cache:
            self.chain = array("Q", [self.chain[-1] ^ UNCACHED_MASK])
        self._tier2: PrefixHash | None = None

    def add_surplus(self, tokens: int) -> None:
        """Correct the estimated length by what is known of the prompt's blocks."""
        self.prompt_tokens = self.estimate + tokens
        self.hash_tokens = max(1, round(self.block_tokens * self.prompt_tokens / self.estimate))

    @property
    def media(self) -> MediaKey | None:
        """The first image, sound or file of the prompt; None without one."""
        found = self._request.prompt.first_attachment
        return None if found is None else MediaKey(found[1], found[0] // BLOCK_BYTES)

    @property
    def tier1_bytes(self) -> int:
        """Length of the tier-1 prefix in the canonical prompt."""
        return boundary_end(self._request.prompt, self._rule)

    @property
    def tier1_tokens(self) -> int:
        """Estimated tokens of the tier-1 prefix."""
        return self.ratio.tokens(self.tier1_bytes)

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: its session, else the tier-1 prefix and the next message; None without either."""
        if self._tier2 is None:
            served, prompt = self._served, self._request.prompt
            self._tier2 = self.session or self._hasher.tier2(prompt, served.model, self._rule, served.adapter)
        return self._tier2

    def structure(self, tools: Any) -> PromptStructure:
        """Structure of the prompt, without its text; ``tools`` as the client sent them. 1 ms: not for every request."""
        return describe_structure(self._request.prompt, tools, self._request.session_key, self._hasher.digest)


_target, _running, _waiting_tokens = map(attrgetter, ("target", "running", "waiting_tokens"))


class CandidateLoads:
    """Loads of candidates at one moment; few objects, because one is made for each request."""

    def __init__(self, loads: list[Load]) -> None:
        self.targets: list[TargetId] = list(map(_target, loads))
        self.running: list[int] = list(map(_running, loads))
        self.waiting_tokens: list[int] = list(map(_waiting_tokens, loads))

    def __len__(self) -> int:
        return len(self.targets)

    def as_json(self) -> list[dict[str, Any]]:
        """As JSON values for the admin port."""
        return [
            {"replica": target, "running": running, "waiting_tokens": waiting}
            for target, running, waiting in zip(self.targets, self.running, self.waiting_tokens, strict=True)
        ]


class CandidateCosts(CandidateLoads):
    """Loads of candidates, with the values that a strategy compares."""

    def __init__(self, loads: list[Load], estimates: list[Estimate]) -> None:
        super().__init__(loads)
        self.estimates = estimates

    def as_json(self) -> list[dict[str, Any]]:
        """As JSON values for the admin port."""
        return [load | estimate._asdict() for load, estimate in zip(super().as_json(), self.estimates, strict=True)]


class Decision:
    """Where a request goes, and everything that explains why."""

    def __init__(
        self,
        route: Route,
        matched_by: MatchedBy,
        served: ServedModel,
        target: Target,
        choice: Choice,
        candidates: Candidates,
        keys: RequestKeys,
    ) -> None:
        self.route = route
        self.matched_by = matched_by
        self.served = served
        self.target = target
        self.choice = choice
        self.candidates = candidates
        self.keys = keys

    @property
    def replica(self) -> ReplicaConfig:
        """The replica that gets the request."""
        return self.target.replica

    @property
    def pool(self) -> str:
        """The pool's name."""
        return self.route.pool

    @property
    def group(self) -> str:
        """The task group; "" for none."""
        return self.route.group

    @property
    def policy(self) -> PolicyConfig:
        """The policy, with the revision that placed the request."""
        return self.route.policy

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.policy.settings.name

    @property
    def reason(self) -> Reason:
        """Why the replica was chosen."""
        return self.choice.reason

    @property
    def prefix(self) -> PrefixHash | None:
        """The tier-1 key."""
        return self.keys.tier1

    def candidate_loads(self, limit: int | None = None) -> CandidateLoads:
        """Current loads of up to ``limit`` candidates: the chosen one, those that were skipped, then others."""
        loads = self.candidates.loads
        if limit is None or len(loads) <= limit:
            return CandidateLoads(list(loads.values()))
        return CandidateLoads([loads[name] for name in self._first_candidates(limit)])

    def candidate_costs(self, limit: int | None = None) -> CandidateCosts:
        """Current loads of up to ``limit`` candidates, with the values that the strategy compares."""
        names = list(self._first_candidates(limit))
        loads = self.candidates.loads
        estimates = self.route.strategy.estimate(self.keys, self.candidates, names)
        return CandidateCosts([loads[name] for name in names], estimates)

    def other_candidates(self, limit: int) -> list[TargetId]:
        """Up to ``limit`` candidates beside the chosen one: those that were skipped, then others."""
        return [name for name in self._first_candidates(limit + 1) if name != self.choice.target][:limit]

    def _first_candidates(self, limit: int | None) -> Collection[TargetId]:
        loads = self.candidates.loads
        if limit is None or len(loads) <= limit:
            return loads.keys()
        return list(dict.fromkeys((self.choice.target, *self.choice.skipped, *islice(loads, limit))))[:limit]


class _Pool(NamedTuple):
    """One prepared pool."""

    find_group: Callable[[ServedModel, PlacementRequest], MatchedGroup]
    own: Route  # of requests without a task group
    by_group: dict[str, Route]
    ratios: dict[str, TokenRatio]  # by model; "" is any other


class Placement:
    """One prepared configuration.

    ``seed`` varies what need not agree between routers, such as ties; ``router`` is this router's name, to which
    canaries may be limited.
    """

    def __init__(
        self,
        config: RouterConfig,
        loads: LoadTracker,
        seed: int = 0,
        residency: Residency | None = None,
        router: str = "",
        ratios: TokenRatios | None = None,
    ) -> None:
        self.config = config
        self._loads = loads
        self._residency = Residency() if residency is None else residency
        self._hasher = PrefixHasher(config.hash_secret)
        ratios = TokenRatios() if ratios is None else ratios
        self.models = Models(config)
        self.matcher = TaskGroupMatcher(config, self._hasher)
        self._pools: dict[str, _Pool] = {}
        self.targets_by_replica = {
            replica.name: [target.id for target in targets_of(replica)]
            for pool in config.pools
            for replica in pool.replicas
        }
        self._residency_pools = {pool.name for pool in config.pools if uses_residency(pool)}
        for pool in config.pools:
            builder = RouteBuilder(pool, self._hasher, loads, self._residency, seed=seed, router=router)
            by_group = {group.name: builder.route(group) for group in pool.groups}
            pool_ratios = {model: ratios.for_model(pool.name, model) for model in models_of(pool)}
            own = builder.route(None)
            self._pools[pool.name] = _Pool(self.matcher.group_finder(pool.name), own, by_group, pool_ratios)

    def carry_over(self, before: Placement) -> None:
        """Let strategies continue with what they learnt under the previous configuration."""
        carry_over(self._routes(), before._routes())

    def prepare(self, health: HealthRegistry) -> Iterator[None]:
        """Compute what the first requests would otherwise wait for, 3 ms for a thousand replicas; yields in between."""
        shared = {id(route.replicas): route.replicas for route in self._routes()}  # canaries use the same replicas
        prefill = [route.prefill.replicas for route in self._routes() if route.prefill is not None]
        shared |= {id(replicas): replicas for replicas in prefill}
        for replicas in shared.values():
            yield from replicas.prepare(health)

    def _routes(self) -> Iterator[Route]:
        """The active routes of all pools."""
        for _, own, by_group, _ in self._pools.values():
            yield own
            yield from by_group.values()

    def _route(self, pool: str, group: str) -> Route:
        """The active route of a task group, or of the pool's own requests."""
        _, own, by_group, _ = self._pools[pool]
        return by_group.get(group, own)

    def decide(
        self, request: PlacementRequest, health: HealthRegistry, excluded: Collection[ReplicaId] = frozenset()
    ) -> Decision:
        """Choose a replica that is active, up and not ``excluded``; UnknownModelError or NoReplicaError."""
        loads = self._loads
        if loads.next_due_s != math.inf and loads.next_due_s <= (now_s := loads.clock()):
            loads.advance(now_s)
        served = self.models.resolve(request.model)
        find_group, route, routes, ratios = self._pools[served.pool.name]
        group, matched_by = find_group(served, request)
        if group is not None:
            route = routes[group.name]
        canary = route.canary_route
        if canary is not None and canary.rule.selects(request, served):
            route = canary.route
        candidates = route.replicas.candidates(health, served.adapter)
        pinned = request.pinned
        if pinned is not None and health.has_limited:
            candidates = route.replicas.with_limited(health, served.adapter)  # no other replica stores the response
        if pinned is not None and pinned in candidates.loads and _is_untried(route, pinned, excluded):
            candidates = candidates.subset([pinned])
        elif excluded:
            candidates = _without_failed(route, candidates, excluded)
            if not candidates.loads and served.adapter:  # all replicas that serve the adapter have failed
                candidates = _without_failed(route, route.replicas.with_adapter(health, served.adapter), excluded)
        if not candidates.loads and health.has_limited:
            candidates = _without_failed(route, route.replicas.with_limited(health, served.adapter), excluded)
        if not candidates.loads:
            raise NoReplicaError(route.pool, route.group, served.adapter)
        ratio = ratios.get(served.model) or ratios[""]
        keys = RequestKeys(request, served, self._hasher, route.tier1, ratio)
        choice = route.strategy.choose(keys, candidates)
        return Decision(route, matched_by, served, route.replicas.targets[choice.target], choice, candidates, keys)

    def decide_fallback(self, decision: Decision, targets: Collection[TargetId]) -> Decision:
        """The decision for the case that an earlier one's replica fails. ``targets``: some of its other candidates."""
        route, keys = decision.route, decision.keys
        candidates = decision.candidates.subset(targets, decision.candidates.unfiltered)
        choice = route.strategy.choose_fallback(keys, candidates)
        target = route.replicas.targets[choice.target]
        return Decision(route, decision.matched_by, decision.served, target, choice, decision.candidates, keys)

    def prefer_within(self, decision: Decision, within_s: float) -> tuple[Decision, float]:
        """The decision, or one for a replica with a predicted TTFT within ``within_s`` if the chosen one has none.

        Also the TTFT: of the replica; if none is within it, the lowest of all.
        """
        now_s, keys, chosen = self._loads.clock(), decision.keys, decision.choice.target
        own_tokens = decision.choice.uncached_tokens(keys.prompt_tokens)
        chosen_s = predicted_s(decision.candidates.loads[chosen], own_tokens, now_s)
        if chosen_s <= within_s:
            return decision, chosen_s
        predicted = {
            target: predicted_s(load, keys.prompt_tokens, now_s)  # what others have cached is not known here
            for target, load in decision.candidates.loads.items()
            if target != chosen
        }
        keeping = [target for target, seconds in predicted.items() if seconds <= within_s]
        if not keeping:
            return decision, min([chosen_s, *predicted.values()])
        preferred = self.decide_fallback(decision, keeping)
        return preferred, predicted[preferred.choice.target]

    def tier1_hashes(self, decision: Decision, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group of the pool, the tier-1 hash with which it would claim a request."""
        return self.matcher.tier1_hashes(decision.served, request)

    def canary_verdict(self, decision: Decision, request: PlacementRequest) -> CanaryVerdict | None:
        """Which revision places a request, and why; None if its policy has no canary."""
        rule = self._route(decision.pool, decision.group).canary_rule
        return None if rule is None else rule.verdict(request, decision.served)

    def preferred_replicas(
        self, pool: str, prefix_key: PrefixKey, replica: str, adapter: str, health: HealthRegistry
    ) -> list[TargetId]:
        """The targets of a replica that will be preferred for a task group's prefix once the replica takes traffic."""
        group, prefix = prefix_key
        if group and group not in self._pools[pool].by_group:
            return []
        route = self._route(pool, group)
        replicas = route.replicas

        def is_available(target: TargetId) -> bool:
            configured = replicas.targets[target].replica
            return (
                configured.state is ReplicaState.ACTIVE
                and health.is_up_after_warm_up(ReplicaId(configured.name))
                and (not adapter or replicas.has_adapter(target, adapter, health))
            )

        targets = self.targets_by_replica.get(replica, [])
        count = route.strategy.preferred_count(prefix)
        if count is None:
            return [target for target in targets if target in replicas.targets and is_available(target)]
        preferred = islice(filter(is_available, replicas.ring.walk(prefix)), count)
        return [target for target in preferred if target in targets]

    def could_serve(self, error: NoReplicaError, replica: str, health: HealthRegistry) -> bool:
        """Whether a replica would be eligible for the rejected request if it were not warming up."""
        replicas, adapter = self._route(error.pool, error.group).replicas, error.adapter
        targets = [target for target in self.targets_by_replica[replica] if target in replicas.targets]
        has_adapter = any(not adapter or replicas.has_adapter(target, adapter, health) for target in targets)
        return has_adapter and health.is_up_after_warm_up(ReplicaId(replica))

    def record_warm_up(self, pool: str, target: TargetId, prompt: WarmUpPrompt) -> None:
        """Record in the residency that a target has prefilled a warm-up prompt."""
        if pool in self._residency_pools:
            self._residency.insert(target, prompt.blocks, self._loads.clock(), prompt.tokens)

    def dispatch(
        self, decision: Decision, *, is_retry: bool = False, is_plain: bool = False, is_prefilled: bool = False
    ) -> Ticket:
        """Record a decision as sent: its load, its traffic, and its blocks in the residency if the pool uses it.

        A request counts as traffic once, however often it is retried. ``is_plain``: its response is not streamed.
        ``is_prefilled``: another replica has prefilled the prompt, so none of it is left to compute.
        """
        route, keys = decision.route, decision.keys
        uncached_tokens = decision.choice.uncached_tokens(keys.prompt_tokens)
        if not is_retry:
            route.strategy.count_request(keys, uncached_tokens)
        residency = self._residency if route.pool in self._residency_pools else None
        if residency is not None and not keys.reads_cache:
            self._record_stored(decision)
            residency = None
        if is_prefilled:
            uncached_tokens = 0
        ticket = record_dispatch(decision.choice, keys, self._loads, residency, uncached_tokens, is_plain=is_plain)
        ticket.ratio, ticket.sample_bytes = keys.ratio, keys.sample_bytes
        return ticket

    def _record_stored(self, decision: Decision) -> None:
        """Record the blocks of a prompt whose response teaches nothing, because its engine uses no cached blocks."""
        keys = decision.keys
        self._residency.insert(
            decision.choice.target, keys.stored_chain, self._loads.clock(), keys.estimate, keys.block_tokens
        )

    # --- prefill by another replica ---

    def choose_prefill(
        self, decision: Decision, health: HealthRegistry, excluded: Collection[ReplicaId] = ()
    ) -> PrefillTarget | None:
        """The replica that prefills a request's prompt first; None if none is available."""
        route = decision.route.prefill
        return None if route is None else route.choose(decision.keys, decision.served.adapter, health, excluded)

    def dispatch_prefill(self, decision: Decision, prefill: PrefillTarget) -> Ticket:
        """Record that a prompt is sent to the replica that prefills it."""
        keys = decision.keys
        return record_dispatch(prefill.choice, keys, self._loads, self._residency)

    def reserve(self, decision: Decision) -> Ticket:
        """Count a request at the replica that will decode it, while another one prefills its prompt."""
        return self._loads.reserve(decision.choice.target)

    def is_eligible(self, decision: Decision, health: HealthRegistry) -> bool:
        """Whether the replica of an earlier decision is still eligible."""
        return decision.choice.target in decision.route.replicas.candidates(health, decision.served.adapter)


def predicted_s(load: Load, own_tokens: int, now_s: float) -> float:
    """TTFT at a replica: the time in which it prefills what waits there, and then the request's own tokens."""
    return (load.remaining_tokens(now_s) + own_tokens) / load.prefill.tokens_per_s


def record_dispatch(
    choice: Choice,
    keys: Keys,
    loads: LoadTracker,
    residency: Residency | None,
    uncached_tokens: int | None = None,
    *,
    is_plain: bool = False,
) -> Ticket:
    """Record a choice's load, and its blocks in the residency; None if no policy uses the residency.

    ``uncached_tokens``: to prefill there, if the residency is used; None: as the choice predicts.
    """
    if residency is None:
        return loads.dispatch(choice.target, keys.prompt_tokens, is_plain=is_plain)
    record = residency.insert(
        choice.target, keys.chain, loads.clock(), keys.estimate, keys.block_tokens, common_hits=choice.common_hits
    )
    if uncached_tokens is None:
        uncached_tokens = choice.uncached_tokens(keys.prompt_tokens)
    return loads.dispatch(choice.target, uncached_tokens, record, is_plain=is_plain)


def _is_untried(route: Route, target: TargetId, excluded: Collection[ReplicaId]) -> bool:
    return route.replicas.targets[target].replica.name not in excluded


def _without_failed(route: Route, candidates: Candidates, failed: Collection[ReplicaId]) -> Candidates:
    return candidates.without([name for replica in failed for name in route.replicas.targets_of_replica(replica)])
