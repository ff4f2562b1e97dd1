"""What routers publish, and what their peers make of it."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import msgspec
import pytest

from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.residency import MAX_PLACED, Residency
from routing.sharing import view as view_module
from routing.sharing.exchange import Message, Seal
from routing.sharing.view import (
    ANSWER_PERIOD_S,
    ANSWER_S,
    HASH_BYTES,
    MAX_PEERS,
    MAX_SILENT,
    PLACED_BYTES,
    REPUBLISH_S,
    SILENT_S,
    OwnState,
    SharedView,
    Update,
)
from routing.types import TargetId

A, B, ELSEWHERE = TargetId("a"), TargetId("b"), TargetId("elsewhere")
SECRET = "5e" * 16
RATE = 8000.0  # tokens/s that are assumed until one is measured


def chain(seed: int, blocks: int = 4) -> array[int]:
    chance = random.Random(seed)
    return array("Q", [chance.getrandbits(64) for _ in range(blocks)])


class Router:
    """The shared part of one router, with a clock of its own."""

    def __init__(self, started_s: float = 0.0) -> None:
        self.now_s = started_s
        self.loads = LoadTracker(lambda: self.now_s)
        self.residency = Residency(64)
        for target in (A, B):
            self.residency.add_replica(target)
        self.own = OwnState(self.loads, self.residency, [A, B])
        self.own.set_peers(1)
        self.view = SharedView(self.loads, self.residency, [A, B])

    def send(self, target: TargetId, tokens: int, prompt: array[int] | None = None) -> Ticket:
        prompt = chain(tokens) if prompt is None else prompt
        record = self.residency.insert(target, prompt, self.now_s)
        return self.loads.dispatch(target, tokens, record)

    def take(self, *, is_whole: bool = False) -> Update | None:
        return self.own.take(self.now_s, is_whole=is_whole)

    def seen(self, target: TargetId) -> tuple[int, int]:
        load = self.loads.load(target)
        return load.running, load.waiting_tokens


def tell(sender: Router, receiver: Router, sequence: int, *, is_whole: bool = False) -> None:
    update = sender.take(is_whole=is_whole)
    assert update is not None
    assert receiver.view.apply(b"sender", sequence, update, receiver.now_s)


def test_a_router_adds_the_loads_of_its_peers_to_its_own():
    one, other, third = Router(), Router(started_s=600.0), Router(started_s=90_000.0)
    one.send(A, 1000)
    other.send(A, 500)
    third.send(B, 70)

    one.view.apply(b"other", 1, other.take(), one.now_s)
    one.view.apply(b"third", 1, third.take(), one.now_s)

    assert one.seen(A) == (2, 1500)
    assert one.seen(B) == (1, 70)
    assert one.take().loads == {"a": (1, 1000)}  # its own part only


def test_a_first_token_and_an_end_reach_the_peers():
    one, other = Router(), Router()
    ticket = one.send(A, 1000)
    tell(one, other, 1)
    ticket.record_first_byte()
    tell(one, other, 2)
    while_decoding = other.seen(A)
    ticket.end()
    tell(one, other, 3)

    assert (while_decoding, other.seen(A)) == ((1, 0), (0, 0))
    assert one.take() is None


def test_progress_of_a_prefill_is_published_in_steps():
    one = Router()
    one.send(A, 8000)
    told = []
    for _ in range(100):  # 10 ms each
        if (update := one.take()) is not None and update.loads:
            told.append(update.loads["a"][1])
        one.now_s += 0.010

    assert told[0] == 8000
    assert all(earlier - later >= 0.1 * RATE for earlier, later in pairwise(told))
    assert 8 <= len(told) <= 11


def test_a_whole_update_that_repeats_loads_changes_nothing():
    one, other = Router(), Router()
    one.send(A, 1000)
    tell(one, other, 1)
    known = other.loads.position
    tell(one, other, 2, is_whole=True)
    repeated = other.loads.position
    one.send(B, 70)
    tell(one, other, 3, is_whole=True)

    assert repeated == known, "the order of candidates is not updated"
    assert (other.seen(A), other.seen(B)) == ((1, 1000), (1, 70))
    assert len(list(other.loads.changes_since(known))) == 1  # of B


def test_a_peer_knows_the_prompts_that_others_have_sent():
    one, other, prompt = Router(), Router(), chain(1, 20)
    one.send(B, 1280, prompt)
    bit = other.residency.replica(B).bit

    assert other.residency.match(prompt).blocks == 0
    tell(one, other, 1)

    assert other.residency.match(prompt).levels == [(20, bit, 20 * 64)]
    assert other.loads.load(B).recent == other.loads.request_weight
    assert other.residency.placed == []  # only the router that has sent a prompt tells of it


def test_a_router_without_peers_collects_no_prompts():
    one = Router()
    one.own.set_peers(0)
    one.send(A, 100)

    assert one.residency.placed is None
    assert one.take(is_whole=True) == Update(True, {"a": (1, 100)}, [])


def test_prompts_that_do_not_fit_are_left_out_and_loads_are_not():
    one = Router()
    for number in range(3):
        one.send(A, 100, chain(number, 10))

    update = one.own.take(0.0, max_bytes=2 * (PLACED_BYTES + 10 * HASH_BYTES))

    assert update.loads == {"a": (3, 300)}
    assert len(update.placed) == 2
    assert one.own.not_published == 1
    assert one.residency.placed == []


def test_a_prompt_that_was_told_a_short_time_ago_is_counted_and_its_blocks_are_not_published_again():
    one, other, prompt = Router(), Router(), chain(1, 20)
    one.send(A, 100, prompt)
    tell(one, other, 1)
    one.send(A, 100, prompt)
    one.send(B, 100, prompt)
    again = one.take()
    other.view.apply(b"sender", 2, again, 0.0)
    one.now_s += REPUBLISH_S + 1
    one.send(A, 100, prompt)
    later = one.take()
    one.own.set_peers(2)
    one.send(A, 100, prompt)

    assert [(target, len(hashes)) for target, _, hashes in again.placed] == [("a", 0), ("b", 20 * HASH_BYTES)]
    assert other.loads.load(A).recent == 2 * other.loads.request_weight
    assert len(later.placed[0][2]) == 20 * HASH_BYTES
    assert len(one.take().placed[0][2]) == 20 * HASH_BYTES  # the new peer has none of them


def test_what_is_remembered_as_published_is_bounded(monkeypatch):
    monkeypatch.setattr(view_module, "MAX_PUBLISHED", 3)
    one = Router()
    for number in range(50):
        one.send(A, 100, chain(number))
        one.take()

    assert sum(map(len, one.own._published_prompts)) <= 8


def test_prompts_of_peers_are_not_recorded_at_a_replica_that_caches_nothing():
    one, other, prompt = Router(), Router(), chain(1, 20)
    other.residency.replica(A).caches_nothing = True
    one.send(A, 100, prompt)
    tell(one, other, 1)

    assert other.residency.match(prompt).blocks == 0
    assert other.loads.load(A).recent > 0


def test_prompts_that_wait_for_a_publisher_are_bounded():
    one = Router()
    for number in range(MAX_PLACED + 2):
        one.residency.insert(A, chain(number), 0.0)

    assert len(one.residency.placed) == MAX_PLACED


def test_a_lost_update_is_repaired_by_the_next_whole_one():
    one, other = Router(), Router()
    ticket = one.send(A, 1000)
    tell(one, other, 1)
    ticket.end()
    one.take()  # sequence 2 is lost
    one.send(B, 7)
    tell(one, other, 3)
    before = other.seen(A)
    tell(one, other, 4, is_whole=True)

    assert before == (1, 1000)
    assert other.seen(A) == (0, 0)
    assert other.seen(B) == (1, 7)
    assert other.view.lost == 1


def test_an_update_that_is_repeated_or_late_is_ignored():
    one, other = Router(), Router()
    one.send(A, 1000)
    first = one.take()
    one.send(A, 500)
    second = one.take()
    assert other.view.apply(b"one", 8, second, 0.0)

    assert not other.view.apply(b"one", 7, first, 0.0)
    assert not other.view.apply(b"one", 8, second, 0.0)
    assert other.seen(A) == (2, 1500)
    assert other.view.placed == 1


def test_a_silent_peer_does_not_count_until_it_is_heard_again():
    one, other = Router(), Router()
    one.send(A, 1000)
    other.send(A, 30)
    tell(one, other, 1)
    other.now_s = SILENT_S
    other.view.expire(other.now_s)
    just_before = other.seen(A)
    other.now_s += 0.01
    other.view.expire(other.now_s)
    silent, counted = other.seen(A), other.view.counted
    tell(one, other, 2, is_whole=True)

    assert just_before == (2, 1030)
    assert (silent, counted) == ((1, 30), 0)
    assert other.seen(A) == (2, 1030)


def test_a_router_that_is_cut_off_counts_no_peer():
    one, other = Router(), Router()
    one.send(A, 1000)
    tell(one, other, 1)

    other.view.expire(other.now_s, is_connected=False)

    assert other.seen(A) == (0, 0)


def test_peers_with_another_configuration_share_what_both_have():
    one, other = Router(), Router()
    one.residency.add_replica(ELSEWHERE)
    one.own.configure([A, ELSEWHERE])
    one.send(A, 10)
    one.send(ELSEWHERE, 20)
    tell(one, other, 1)

    assert other.seen(A) == (1, 10)
    assert len(other.loads) == 1
    assert other.view.placed == 1
    assert other.residency.replica(ELSEWHERE) is None


def test_a_new_configuration_counts_what_peers_have_told_of_its_targets():
    one, other = Router(), Router()
    one.send(A, 10)
    one.send(B, 20)
    tell(one, other, 1)
    other.view.configure([B])
    without = other.seen(A)
    other.view.configure([A, B])

    assert (without, other.seen(A), other.seen(B)) == ((0, 0), (1, 10), (1, 20))


def test_the_number_of_remembered_peers_is_bounded():
    router = Router()
    for number in range(3 * MAX_PEERS):
        router.now_s += 0.001
        router.view.apply(number.to_bytes(8), 1, Update(True, {"a": (1, 5)}, []), router.now_s)

    assert len(router.view.peers) == MAX_PEERS
    assert router.seen(A) == (MAX_PEERS, 5 * MAX_PEERS)


def test_the_number_of_remembered_silent_peers_is_bounded():
    router = Router()
    for number in range(3 * MAX_SILENT):
        router.now_s += 2 * SILENT_S
        router.view.expire(router.now_s)
        router.view.apply(number.to_bytes(8), 1, Update(True, {"a": (1, 5)}, []), router.now_s)

    assert (len(router.view.peers), router.view.counted) == (MAX_SILENT, 1)


def joining(*peers: Router) -> Router:
    """A router that joins these, each of which hears that it asks."""
    new = Router(started_s=5_000.0)
    new.view.identity = b"new"
    for peer in peers:
        new.view.apply(peer.view.identity, 100, peer.take(is_whole=True), new.now_s)
    for peer in peers:
        peer.view.apply(b"new", 1, Update(True, {}, [], asks=new.view.asks), peer.now_s)
    return new


def fleet(*names: bytes) -> list[Router]:
    routers = [Router() for _ in names]
    for router, name in zip(routers, names, strict=True):
        router.view.identity = name
        router.residency.insert(A, chain(1000), 0.0)  # it knows a prompt, and asks nobody
        for other in names:
            if other != name:
                router.view.apply(other, 1, Update(True, {}, []), 0.0)
    return routers


def test_a_router_that_joins_learns_the_prompts_that_others_have_placed():
    first, second = fleet(b"a", b"b")
    for number in range(30):
        first.now_s += 1
        first.send(A if number % 2 else B, 100, chain(number, 20))
    new = joining(first, second)
    heard = chain(77, 20)
    new.view.apply(b"b", 101, Update(False, {}, [("a", 64, heard.tobytes())]), new.now_s)

    answer = first.view.answer(first.now_s, 1 << 20)
    assert second.view.answer(second.now_s, 1 << 20) is None, "one peer answers"
    other = Router()
    for router in (new, other):
        router.view.apply(b"a", 102, answer, router.now_s)
        router.view.restore(29)
        assert (router.view.restored, router.view.asks) == ((29, True) if router is new else (0, True))
        router.view.restore()

    assert [new.residency.match(chain(number, 20)).blocks for number in range(30)] == [20] * 30
    assert new.residency.match(heard).blocks == 20
    assert list(new.residency.replica(A).uses)[-1].used_s == new.now_s, "heard of last"
    assert len(other.residency) == 0, "the answer is for another router"
    assert first.view.answer(first.now_s, 1 << 20) is None
    joining_again = Update(True, {}, [], asks=True)
    first.view.apply(b"new", 2, joining_again, first.now_s)
    assert first.view.answer(first.now_s + ANSWER_S, 1 << 20) is None, "once for each router"


def test_answers_are_bounded_in_bytes_and_frequency():
    [only] = fleet(b"a")
    for number in range(200):
        only.send(A if number % 2 else B, 100, chain(number, 20))
    joining(only)
    for asking in (b"x", b"y"):
        only.view.apply(asking, 1, Update(True, {}, [], asks=True), 0.0)

    sizes = []
    while (answer := only.view.answer(0.0, 4000)) is not None:
        assert answer.answer[0] == b"new"
        sizes.append(sum(len(uses) for _, uses in answer.answer[1]))

    assert all(2000 < size <= 4000 for size in sizes)
    assert len(sizes) == 2, "the latest prompts of each replica"
    assert only.view.answer(ANSWER_PERIOD_S - 0.1, 4000) is None
    assert only.view.answer(ANSWER_PERIOD_S, 4000).answer[0] == b"x"


def test_an_answer_ends_with_the_wait_for_it_and_prolongs_that():
    [only] = fleet(b"a")
    only.send(A, 100, chain(1, 20))
    only.send(B, 100, chain(2, 20))
    new = joining(only)
    first = only.view.answer(0.0, 300)
    new.now_s += ANSWER_S - 0.1
    new.view.apply(b"a", 101, first, new.now_s)
    new.now_s += ANSWER_S - 0.1
    new.view.apply(b"a", 102, Update(True, {}, []), new.now_s)

    assert new.view.asks
    only.view.apply(b"new", 2, Update(True, {}, []), 0.1)
    assert only.view.answer(0.1, 300) is None, "nobody waits for the other replica's prompts"


def test_asks_that_are_repeated_or_of_routers_that_are_gone_are_bounded():
    """Whoever has recorded messages on the channel can publish them again."""
    [only] = fleet(b"a")
    asking = Update(True, {}, [], asks=True)
    for second in range(5):
        for number in range(2 * MAX_PEERS):
            only.view.apply(number.to_bytes(8), 1, asking, float(second))
        answers = [only.view.answer(float(second), 1 << 20) for _ in range(3)]
        assert [answer is not None for answer in answers] == [True, False, False]
    only.view.expire(5.0 + SILENT_S)

    assert len(only.view.peers) == MAX_PEERS
    assert only.view.answer(5.0 + SILENT_S, 1 << 20) is None


def test_routers_that_ask_leave_the_answer_to_one_that_knows_and_wait_for_a_limited_time():
    new, other = joining(), joining()
    for router in (new, other):
        router.view.apply(b"knows", 1, Update(True, {}, []), router.now_s)
    new.view.apply(b"other", 1, Update(True, {}, [], asks=True), new.now_s)
    assert new.view.asks
    new.view.apply(b"knows", 2, Update(False, {}, []), new.now_s + ANSWER_S + 0.1)
    other.view.apply(b"new", 1, Update(False, {}, [], answer=(b"new", [("a", b"no records"), ("none", b"")])), 0.0)
    other.view.restore()

    assert new.view.answer(new.now_s, 1 << 20) is None
    assert not new.view.asks
    assert len(other.residency) == 0


def test_a_sealed_message_can_be_opened_by_routers_with_the_same_secret_only():
    message = Message(b"identity", 7, Update(True, {"a": (1, 2)}, [("a", 64, chain(1).tobytes())]))
    seal = Seal(SECRET)
    data = seal.close(message)

    assert Seal(SECRET).open(data) == message
    assert Seal("00" * 16).open(data) is None
    assert Seal("00" * 16).channel != seal.channel
    assert SECRET.encode() not in data + seal.channel


def test_a_changed_message_is_not_opened():
    seal, chance = Seal(SECRET), random.Random("changes")
    data = seal.close(Message(b"identity", 7, Update(False, {}, [])))
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        assert seal.open(changed) is None
        assert seal.open(data[:at]) is None
    for size in range(64):
        assert seal.open(chance.randbytes(size)) is None


@pytest.mark.parametrize(
    "update",
    [
        [True, {"a": (-1, 0)}, []],
        [True, {"a": (1, -5)}, []],
        [True, {"a": 3}, []],
        [True, {}, [["a", 0, b""]]],
        [True, {}, [["a", 64, bytes(8 * 2049)]]],
        {"a": 1},
        None,
    ],
)
def test_an_update_of_another_shape_is_not_opened(update):
    seal = Seal(SECRET)
    data = seal.close(Message(b"identity", 1, update))

    assert seal.open(data) is None
    assert msgspec.msgpack.encode(update)  # it was a message
