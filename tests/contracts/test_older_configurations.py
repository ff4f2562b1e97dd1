"""Configurations of earlier releases are still readable with the same meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing.schema import Boundary, PrefixHashSettings, SessionAffinitySettings, dump_snapshot, load_snapshot

FOLDER = Path(__file__).parent.parent / "data" / "configurations"
WITHOUT_CANARIES = FOLDER / "without_canaries.json"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_an_older_document_is_read(path: Path) -> None:
    assert load_snapshot(path.read_bytes()).config.pools


def test_a_policy_without_a_canary_field_has_no_canary() -> None:
    config = load_snapshot(WITHOUT_CANARIES.read_bytes()).config
    policies = [pool.policy for pool in config.pools] + [
        group.policy for pool in config.pools for group in pool.groups if group.policy
    ]

    assert len(policies) == 3
    assert [policy.canary for policy in policies] == [None] * 3


def test_settings_that_were_removed_are_left_out() -> None:
    """Older routers kept them in their state files, and older control planes in published configurations."""
    document = WITHOUT_CANARIES.read_bytes()
    pool = load_snapshot(document).config.pools[0]

    assert b'"load_factor":2.0,"min_bound":4' in document
    assert b'"auto_replicas":{"reserved":1,"max":2}' in document
    assert b'"share_half_life":200' in document
    assert pool.groups[0].replicas is None
    assert pool.policy.settings == PrefixHashSettings(boundary=Boundary.BYTES)
    assert pool.groups[1].policy
    assert pool.groups[1].policy.settings == SessionAffinitySettings()


def test_the_default_slack_is_left_out_so_that_older_routers_read_the_configuration() -> None:
    config = load_snapshot(WITHOUT_CANARIES.read_bytes()).config

    assert b"slack_s" not in dump_snapshot(config, 8).document


def test_a_configuration_without_a_canary_is_readable_by_routers_from_before_canaries() -> None:
    """A configuration without a canary has no canary fields, so older routers accept it."""
    config = load_snapshot(WITHOUT_CANARIES.read_bytes()).config

    assert b'"canary"' not in dump_snapshot(config, 8).document
