"""Tokens of blocks: estimated for new text, then known from what engines report of the prompts that contain it."""

from __future__ import annotations

import pytest

from routing.balancing.residency import Residency, SentPrompt
from routing.balancing.residency_snapshot import decode_uses, encode_uses, restore_uses
from tests.routing.building import names

A, B = names(2)
BLOCK = 10  # estimated tokens of a block
MAX_HASH = (1 << 64) - 1


def chain(*parts: int, blocks: int = 8) -> list[int]:
    """A prompt of several parts of ``blocks`` each."""
    return [hash((parts[: at // blocks + 1], at)) & MAX_HASH for at in range(len(parts) * blocks)]


def residency_of(capacity: int = 100_000, engine_block_tokens: int | None = None) -> Residency:
    residency = Residency(block_tokens=BLOCK, run_tokens=4 * BLOCK)
    for replica in (A, B):
        residency.add_replica(replica, capacity, engine_block_tokens)
    return residency


def sent(residency: Residency, prompt: list[int], at_s: float = 0.0, replica: str = A) -> SentPrompt:
    return residency.insert(replica, prompt, at_s, BLOCK * len(prompt))


def predicted(residency: Residency, prompt: list[int], replica: str = A) -> int:
    return residency.match(prompt).tokens(residency.replica(replica).bit, 1_000_000)


def test_the_tokens_up_to_the_end_of_each_turn_are_predicted_exactly():
    residency = residency_of()
    sent(residency, chain(1)).confirm(160, 0)  # twice the tokens of the estimate
    sent(residency, chain(1, 2), 1.0).confirm(160 + 40, 160)  # half of the estimate

    assert predicted(residency, chain(1, 3)) == 160
    assert predicted(residency, chain(1, 2, 3)) == 200
    assert residency.match(chain(1, 2, 3)).surplus_tokens == 40  # 16 blocks have 200 tokens instead of 160


def test_a_part_of_a_turn_has_its_part_of_the_tokens():
    residency = residency_of()
    sent(residency, chain(1)).confirm(160, 0)
    shared = chain(1)[:3]

    assert predicted(residency, [*shared, 77, 78]) == 60
    sent(residency, [*shared, 77, 78], 1.0)  # splits a run
    assert predicted(residency, chain(1)) == 160
    assert predicted(residency, shared) == 60
    entry = residency.replica(A)
    assert entry.tokens == sum(run.tokens for run in entry.runs)


def test_of_a_burst_the_first_response_tells_the_tokens_of_what_all_share():
    residency = residency_of()
    first, second = sent(residency, chain(1, 2)), sent(residency, chain(1, 3))
    first.confirm(240, 0)  # 120 in each part
    second.confirm(200, 0)

    assert predicted(residency, chain(1)) == 120
    assert predicted(residency, chain(1, 2)) == 240
    assert predicted(residency, chain(1, 3)) == 200


def test_another_replica_knows_the_tokens_and_keeps_them():
    residency = residency_of()
    sent(residency, chain(1)).confirm(160, 0)
    sent(residency, chain(1, 2), 1.0).confirm(200, 160)
    sent(residency, chain(1, 2), 2.0, B).confirm(200, 0)

    assert predicted(residency, chain(1), B) == 160
    assert predicted(residency, chain(1, 2), B) == 200


def test_reported_tokens_take_capacity_at_every_replica_that_has_the_text():
    residency = residency_of(capacity=400)
    early = sent(residency, chain(1), 0.0)
    sent(residency, chain(1), 1.0, B)
    early.confirm(320, 0)
    assert [residency.replica(replica).tokens for replica in (A, B)] == [320, 320]
    sent(residency, chain(2), 2.0, B)
    sent(residency, chain(3), 3.0, B)

    assert predicted(residency, chain(1), B) < 320
    assert predicted(residency, chain(1), A) == 320
    assert residency.replica(B).tokens <= 400


def test_fewer_tokens_than_estimated_leave_capacity_for_more_prompts():
    residency = residency_of(capacity=400)
    for number in range(10):  # by the estimate, five fit
        sent(residency, chain(number), float(number)).confirm(32, 0)

    assert all(predicted(residency, chain(number)) == 32 for number in range(10))


def test_a_prediction_ends_on_a_block_of_the_engine():
    residency = residency_of(engine_block_tokens=16)
    sent(residency, chain(1)).confirm(100, 0)

    assert predicted(residency, chain(1, 2)) == 96
    assert residency.match(chain(1, 2)).tokens(residency.replica(A).bit, 90) == 80


@pytest.mark.parametrize(("reported", "known"), [(1, 10), (80_000, 640)])
def test_an_implausible_report_is_limited(reported, known):
    residency = residency_of()
    sent(residency, chain(1)).confirm(reported, 0)

    assert predicted(residency, chain(1)) == known


def test_a_prompt_shorter_than_what_is_known_of_it_changes_nothing():
    residency = residency_of()
    sent(residency, chain(1)).confirm(160, 0)
    sent(residency, chain(1), 1.0).confirm(100, 100)

    assert predicted(residency, chain(1)) == 160


def test_a_snapshot_has_the_tokens():
    residency, restored = residency_of(), residency_of()
    sent(residency, chain(1)).confirm(160, 0)
    sent(residency, chain(1, 2), 1.0).confirm(200, 160)
    sent(residency, chain(3), 2.0)  # without a response
    saved = decode_uses(b"".join(encode_uses(residency.replica(A), 3.0, 1000.0, 1 << 20)))
    list(restore_uses(restored, A, [saved], 3.0, 1000.0, 60.0))

    for prompt in (chain(1), chain(1, 2), chain(3)):
        assert predicted(restored, prompt) == predicted(residency, prompt)
    assert restored.replica(A).tokens == residency.replica(A).tokens
    sent(restored, chain(3), 4.0).confirm(400, 0)
    assert predicted(restored, chain(3)) == 400
