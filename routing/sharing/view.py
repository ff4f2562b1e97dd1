"""The shared view of a router: what it publishes of its own requests, and what its peers have published of theirs.

Theory of operation. Each router publishes its own queued work and running requests at each target, as absolute values,
so that a lost update is repaired by the next one; and the prompts that it has sent, as their chains of block hashes. A
router decides by the sum of its own exact loads and the last values of its peers, and by a residency index with the
prompts of all. So its own decisions count at once, those of others after the delay of an update.

Values are published when they change. While a prompt is being prefilled its remaining tokens fall all the time; that is
published once it makes a difference of ``PROGRESS_S``. A *whole* update has all loads above zero, and replaces what the
router has published before: it is sent at least every ``WHOLE_S``, and is a heartbeat at the same time. A peer that
was not heard of for ``SILENT_S``, by this router's own clock, counts as nothing.

A router that starts without any recorded prompt asks for those of its peers. The peer with the lowest identity answers
with a snapshot of each replica's latest prompts. Ages are relative, so that clocks may differ.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from math import inf
from typing import Annotated, Final

from msgspec import Meta, Struct

from routing.balancing.block_index import Chain
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.balancing.residency_snapshot import decode_uses, encode_uses, restore_uses
from routing.types import TargetId

PERIOD_S: Final = 0.05  # between updates while something has changed
WHOLE_S: Final = 0.3  # between whole updates: a peer misses two of them before this router counts as silent
SILENT_S: Final = 1.0
PROGRESS_S: Final = 0.1  # of prefill, at the target's measured rate
REPUBLISH_S: Final = 10.0  # the blocks of a prompt that were published within this time are not published again
MAX_PUBLISHED: Final = 8192  # prompts that are remembered as published, and as many before them
MAX_PEERS: Final = 256  # processes that are remembered; beyond that the one that was silent for longest is forgotten
MAX_SILENT: Final = 64  # of these: the silent ones
HASH_BYTES: Final = 8
MAX_HASHES_BYTES: Final = HASH_BYTES * 2048  # of the longest chain
PLACED_BYTES: Final = 32  # of a prompt in an update, besides its hashes
ANSWER_S: Final = 5.0  # how long a router waits for an answer, or the next part of it
ANSWER_PERIOD_S: Final = 1.0  # between two answers of one router
MAX_ANSWER_BYTES: Final = 128 << 10  # of an update, and of one replica's prompts: about a million tokens
RESTORED_AT_ONCE: Final = 16  # prompts of an answer that a router records every period, which takes milliseconds
MAX_HEARD: Final = 1024  # prompts that are remembered while a router waits for an answer

Name = Annotated[str, Meta(max_length=128)]
Running = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
BlockTokens = Annotated[int, Meta(ge=1, le=65_536)]
Hashes = Annotated[bytes, Meta(max_length=MAX_HASHES_BYTES)]
Uses = Annotated[bytes, Meta(max_length=MAX_ANSWER_BYTES)]


class Update(Struct, array_like=True):
    """What one router publishes at one time. Nothing in it reveals any text: hashes are keyed."""

    is_whole: bool  # ``loads`` are all loads above zero; else those that changed
    loads: dict[Name, tuple[Running, Tokens]]  # by target: running requests, and tokens that wait for their prefill
    # Target, estimated tokens of a block, block hashes of a prompt; no hashes: they were published a short time ago.
    placed: list[tuple[Name, BlockTokens, Hashes]]
    asks: bool = False  # for the prompts that peers know
    answer: tuple[bytes, list[tuple[Name, Uses]]] | None = None  # to a router that asked: records of replicas' prompts


class OwnState:
    """What this router publishes for its peers."""

    def __init__(self, loads: LoadTracker, residency: Residency, targets: Iterable[TargetId] = ()) -> None:
        self._loads = loads
        self._residency = residency
        self._targets = set(targets)
        self._position: int | None = None  # in the load tracker's journal; None: everything has changed
        self._waiting: set[TargetId] = set()  # targets at which a prompt of this router is being prefilled
        self._published: dict[
            TargetId, tuple[int, int, int]
        ] = {}  # running, waiting tokens without progress, and with it
        self._published_prompts: tuple[set[tuple[TargetId, int]], set[tuple[TargetId, int]]] = (set(), set())
        self._published_since_s = -inf  # start of the newer of the two periods
        self._peers = 0
        self.not_published = 0  # prompts that were left out because an update would have become too large

    @property
    def has_waiting(self) -> bool:
        """Whether loads fall without any event: a prompt of this router is being prefilled."""
        return bool(self._waiting)

    def configure(self, targets: Iterable[TargetId]) -> None:
        """Publish the loads of these targets from now on."""
        self._targets = set(targets)
        self._published = {name: load for name, load in self._published.items() if name in self._targets}
        self._position = None

    def set_peers(self, count: int) -> None:
        """Collect the prompts that are sent from now on for the next update if there are peers; new ones know none."""
        if count != self._peers:
            if not count or not self._peers:
                self._residency.placed = [] if count else None
                self._position = None
            self._peers, self._published_prompts = count, (set(), set())

    def take(self, now_s: float, *, is_whole: bool = False, max_bytes: float = inf) -> Update | None:
        """What changed since the last update, prompts only as far as they fit; None if nothing did."""
        loads = self._loads
        loads.advance(now_s)
        changes = None if self._position is None or is_whole else loads.changes_since(self._position)
        self._position = loads.position
        names = self._targets if changes is None else self._waiting | {load.target for load in changes} & self._targets
        self._waiting = set()
        changed: dict[str, tuple[int, int]] = {}
        for name in names:
            values = self._values(name, now_s, is_whole=is_whole)
            if values is not None:
                changed[name] = values
        placed = self._take_placed(now_s, max_bytes)
        return Update(is_whole, changed, placed) if changed or placed or is_whole else None

    def _values(self, name: TargetId, now_s: float, *, is_whole: bool) -> tuple[int, int] | None:
        """Running requests and waiting tokens of this router at a target; None if nothing has changed."""
        load = self._loads.load(name)
        running, waiting = load.running - load.remote_running, load.waiting_tokens - load.remote_tokens
        remaining = max(0, int(load.remaining_tokens(now_s)) - load.remote_tokens)
        if load.waiting:
            self._waiting.add(name)
        before = self._published.get(name, (0, 0, 0))
        progress = abs(before[2] - remaining)
        has_changed = before[:2] != (running, waiting) or progress >= PROGRESS_S * load.prefill.tokens_per_s
        if has_changed or is_whole:
            self._published[name] = (running, waiting, remaining)
        if not is_whole:
            return (running, remaining) if has_changed else None
        return (running, remaining) if running or remaining else None

    def _take_placed(self, now_s: float, max_bytes: float) -> list[tuple[str, int, bytes]]:
        placed = self._residency.placed
        if not placed:
            return []
        self._residency.placed = []
        age_s = now_s - self._published_since_s
        if age_s > REPUBLISH_S / 2 or len(self._published_prompts[0]) > MAX_PUBLISHED:
            self._published_prompts = (set(), set() if age_s > REPUBLISH_S else self._published_prompts[0])
            self._published_since_s = now_s
        new, old = self._published_prompts
        taken: list[tuple[str, int, bytes]] = []
        for target, block_tokens, chain in placed:
            # A block's hash depends on all blocks before it.
            is_new = len(chain) > 0 and (prompt := (target, chain[-1])) not in new and prompt not in old
            max_bytes -= PLACED_BYTES + (HASH_BYTES * len(chain) if is_new else 0)
            if max_bytes < 0:
                self.not_published += len(placed) - len(taken)
                break
            if is_new:
                new.add(prompt)
            taken.append((target, block_tokens, array("Q", chain).tobytes() if is_new else b""))
        return taken


class Peer:
    """Another router, as known from its updates."""

    __slots__ = ("asks", "is_answered", "is_counted", "loads", "seen_s", "sequence")

    def __init__(self) -> None:
        self.sequence = -1  # of its last update
        self.seen_s = 0.0  # when that arrived, by this router's clock
        self.loads: dict[str, tuple[int, int]] = {}
        self.is_counted = False  # not silent
        self.asks = False  # it knows no prompts
        self.is_answered = False


class SharedView:
    """What all peers have published, applied to this router's loads and residency."""

    def __init__(self, loads: LoadTracker, residency: Residency, targets: Iterable[TargetId] = ()) -> None:
        self._loads = loads
        self._residency = residency
        self._targets = set(targets)
        self.peers: dict[bytes, Peer] = {}  # by the identity of a router's process
        self.identity = b""  # of this router's process
        self._heard: list[tuple[TargetId, Chain, int]] | None = None  # since this router waits for an answer
        self._waits_until_s = inf  # for an answer; infinite: nothing was heard of a peer yet
        self._asking = b""  # the router that this one answers
        self._unanswered: list[TargetId] = []  # replicas whose prompts it was not sent yet
        self._answer_at_s = -inf  # not before
        self._restoring: Iterator[int] = iter(())  # records the prompts of an answer
        self.lost = 0  # updates of peers that never arrived
        self.placed = 0  # prompts of peers that were added to the residency
        self.restored = 0  # prompts of an answer

    @property
    def counted(self) -> int:
        """Peers that are not silent."""
        return sum([peer.is_counted for peer in self.peers.values()])

    def configure(self, targets: Iterable[TargetId]) -> None:
        """Use what peers publish of these targets; call before the loads of others are forgotten."""
        before, self._targets = self._targets, set(targets)
        for name in before - self._targets:
            self._loads.set_remote_load(name, 0, 0)
        self._sum(self._targets - before)

    def apply(self, identity: bytes, sequence: int, update: Update, now_s: float) -> bool:
        """Use a peer's update; False if a later one was used before."""
        peer = self.peers.get(identity)
        if peer is None:
            peer = self._add(identity)
        if sequence <= peer.sequence:
            return False
        self._begin_waiting(now_s)
        if peer.sequence >= 0:
            self.lost += sequence - peer.sequence - 1
        peer.sequence, peer.seen_s = sequence, now_s
        if not peer.is_counted:  # what it published before its silence is outdated
            peer.is_counted, peer.loads = True, {}
        before, loads = peer.loads, update.loads if update.is_whole else peer.loads | update.loads
        # Only these: each is a change for the order of candidates, and whole updates repeat the loads of all targets.
        changed = [name for name in before.keys() | update.loads if before.get(name) != loads.get(name)]
        peer.loads = loads
        self._add_placed(update, now_s)
        self._sum(changed)
        if update.is_whole:
            peer.asks = update.asks
        if update.answer is not None and update.answer[0] == self.identity and self._heard is not None:
            self._waits_until_s = now_s + ANSWER_S
            self._restoring = itertools.chain(self._restoring, self._restored(update.answer[1], now_s))
        return True

    def _add_placed(self, update: Update, now_s: float) -> None:
        for name, block_tokens, hashes in update.placed:
            replica = self._residency.replica(target := TargetId(name)) if name in self._targets else None
            if replica is not None and not len(hashes) % HASH_BYTES:
                if not replica.caches_nothing:
                    chain = _chain(hashes)
                    self._residency.add_stored(target, chain, now_s, block_tokens)
                    if self._heard is not None and len(self._heard) < MAX_HEARD:
                        self._heard.append((target, chain, block_tokens))
                self._loads.count_remote_request(target)
                self.placed += 1

    # --- prompts for a router that joins ---

    @property
    def asks(self) -> bool:
        """Whether this router waits for the prompts that its peers know."""
        return self._heard is not None

    def answer(self, now_s: float, max_bytes: int) -> Update | None:
        """The next part of an answer to a router that asked; None if there is none to be sent now."""
        waiting = [known for known, peer in self.peers.items() if peer.asks and peer.is_counted]
        if self._asking not in waiting:
            self._unanswered = []
        if not self._unanswered:
            asking = [known for known in waiting if not self.peers[known].is_answered and self._answers(known)]
            if not asking or now_s < self._answer_at_s:
                return None
            self._asking, self.peers[asking[0]].is_answered = asking[0], True
            self._unanswered, self._answer_at_s = sorted(self._targets), now_s + ANSWER_PERIOD_S
        cached: list[tuple[str, bytes]] = []
        free_bytes = max_bytes = min(max_bytes, MAX_ANSWER_BYTES)
        while self._unanswered:
            replica = self._residency.replica(name := self._unanswered[-1])
            uses = b"" if replica is None else b"".join(encode_uses(replica, now_s, 0.0, max_bytes))
            if len(uses) > free_bytes:
                break
            free_bytes -= len(uses)
            cached.append((name, uses))
            self._unanswered.pop()
        return Update(False, {}, [], answer=(self._asking, cached))

    def _answers(self, asking: bytes) -> bool:
        """Whether this router has the lowest identity, of those that do not ask themselves if there are any."""
        own = (self.asks, self.identity)
        others = [(peer.asks, identity) for identity, peer in self.peers.items() if peer.is_counted]
        return all(own < other for other in others if other[1] != asking)

    def _begin_waiting(self, now_s: float) -> None:
        """Wait for an answer from the first update of a peer on, if this router knows no prompts."""
        if self._waits_until_s == inf:
            self._waits_until_s = now_s + ANSWER_S
            self._heard = None if len(self._residency) else []
        elif now_s > self._waits_until_s:
            self._heard = None

    def restore(self, prompts: int = RESTORED_AT_ONCE) -> None:
        """Record at most so many prompts of an answer; call it every period."""
        self.restored += len(list(itertools.islice(self._restoring, prompts)))

    def _restored(self, cached: list[tuple[str, bytes]], now_s: float) -> Iterator[int]:
        """Record what replicas have cached, before the prompts that were heard of meanwhile."""
        residency = self._residency
        for name, uses in cached:
            if name not in self._targets:
                continue
            target = TargetId(name)
            with suppress(ValueError):  # the others are of use
                yield from restore_uses(residency, target, [decode_uses(uses)], now_s, 0.0, residency.ttl_s)
            for heard, blocks, block_tokens in self._heard or ():
                if heard == target:
                    residency.add_stored(target, blocks, now_s, block_tokens)

    def expire(self, now_s: float, *, is_connected: bool = True) -> None:
        """Stop counting the peers that are silent; all of them if this router is not connected to the others."""
        for peer in self.peers.values():
            if peer.is_counted and (now_s - peer.seen_s > SILENT_S or not is_connected):
                peer.is_counted = False
                self._sum(peer.loads)

    def _add(self, identity: bytes) -> Peer:
        silent = [known for known, peer in self.peers.items() if not peer.is_counted]
        if len(self.peers) >= MAX_PEERS or len(silent) >= MAX_SILENT:
            longest_silent = min(silent or self.peers, key=lambda known: self.peers[known].seen_s)
            peer = self.peers.pop(longest_silent)
            self._sum(peer.loads)
        peer = self.peers[identity] = Peer()
        return peer

    def _sum(self, names: Collection[str]) -> None:
        """Set the remote loads of these targets to the sums over the peers that count."""
        for name in names:
            target = TargetId(name)
            if target not in self._targets:
                continue
            running = waiting = 0
            for peer in self.peers.values():
                if peer.is_counted and (values := peer.loads.get(name)) is not None:
                    running += values[0]
                    waiting += values[1]
            self._loads.set_remote_load(target, running, waiting)


def _chain(hashes: bytes) -> Chain:
    chain = array("Q")
    chain.frombytes(hashes)
    return chain
