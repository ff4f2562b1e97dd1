"""Configurations of earlier releases are still readable with the same meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing.schema import dump_snapshot, load_snapshot

FOLDER = Path(__file__).parent.parent / "data" / "configurations"
WRITTEN_BEFORE_TRIALS = FOLDER / "without_trials.json"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_an_older_document_is_read(path: Path) -> None:
    assert load_snapshot(path.read_bytes()).config.pools


def test_a_policy_that_says_nothing_of_a_trial_has_none() -> None:
    config = load_snapshot(WRITTEN_BEFORE_TRIALS.read_bytes()).config
    policies = [pool.policy for pool in config.pools] + [g.policy for p in config.pools for g in p.groups if g.policy]

    assert len(policies) == 3
    assert [policy.trial for policy in policies] == [None] * 3


def test_a_router_that_knows_no_trials_reads_what_is_written_without_one() -> None:
    """A configuration without a canary has no canary fields, so older routers accept it."""
    config = load_snapshot(WRITTEN_BEFORE_TRIALS.read_bytes()).config

    assert b'"trial"' not in dump_snapshot(config, 8).document
