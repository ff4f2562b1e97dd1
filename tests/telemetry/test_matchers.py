"""One language says which alerts a silence is for and a channel gets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.errors import InvalidError
from telemetry.matchers import (
    KNOWN_VALUES,
    LABELS,
    MAX_CHARS,
    MAX_MATCHERS,
    MAX_VALUES,
    Matcher,
    match_all,
    parse_stored,
    read_matchers,
)

CHAT = {"pool": "chat", "rule": "Hit rate drop", "severity": "critical"}


@pytest.mark.parametrize(
    ("written", "labels", "holds"),
    [
        (["pool=chat"], CHAT, True),
        (["pool=chat", "severity=warning"], CHAT, False),
        (["severity=warning, critical"], CHAT, True),
        (["severity!=warning,critical"], CHAT, False),
        (["pool=ch*"], CHAT, True),
        (["pool!=ch*"], CHAT, False),
        (["pool=*"], {}, True),
        (["replica=r1"], CHAT, False),
        (["replica!=r1"], CHAT, True),  # an alert without the label has "" there
        (['replica=""'], CHAT, True),
        (['replica=""'], {"replica": "r1"}, False),
        (["rule=Hit rate drop"], CHAT, True),
        (["rule=~Hit.*"], CHAT, True),
        (["rule=~rate"], CHAT, False),  # the whole value
        (["rule!~Hit.*"], CHAT, False),
        (["rule!~Slow.*"], CHAT, True),
        (['rule=~"Hit.*"'], CHAT, True),
        (["rule=~(a+)+b"], {"rule": "a" * 100}, False),  # in linear time
        (['rule="Slow, at night*"'], {"rule": "Slow, at night*"}, True),
        (['rule="Slow, at night*"'], {"rule": "Slow, at night and day"}, False),
        (['rule="say \\"no\\" \\\\ ", x'], {"rule": 'say "no" \\ '}, True),
        ([{"label": "rule", "op": "=", "value": "Slow, at night*"}], {"rule": "Slow, at night*"}, True),
        ([{"label": "pool", "op": "=~", "value": "c.*"}], CHAT, True),
    ],
)
def test_matchers_match_whole_values(written, labels, holds):
    matchers = read_matchers(written, may_match_all=True)

    assert match_all(matchers, labels) is holds
    assert [str(matcher) for matcher in parse_stored(map(str, matchers))] == [str(matcher) for matcher in matchers]


@pytest.mark.parametrize(
    "written",
    [
        "severity=critcal", "kind!=hit_rate_dorp", "kind=hit_rte*",
        "severity", "=x", "pool=", "pool=,", "Pool=x", "colour=red", "pool<x", "pool=~(", 'pool="x', 'pool=a"b"', "",
        "pool=" + ",".join(f"b{number}" for number in range(MAX_VALUES + 1)), "pool=" + "x" * MAX_CHARS,
        {"label": "colour", "op": "=", "value": "x"}, {"label": "pool", "op": "<", "value": "x"}, {},
        {"label": "pool", "op": "=~", "value": "("}, {"label": "pool", "op": "=", "value": "x" * MAX_CHARS},
    ],
)  # fmt: skip
def test_invalid_matchers_are_rejected_with_their_path(written):
    with pytest.raises(InvalidError) as caught:
        read_matchers(["pool=chat", written], may_match_all=True)
    assert [fault.path for fault in caught.value.faults] == ["$.matchers[1]"]


@pytest.mark.parametrize("written", [[], ["pool=~.*"], ["pool!=x"], ["pool=*"], ["pool=x"] * (MAX_MATCHERS + 1)])
def test_a_silence_that_matches_everything_is_rejected(written):
    with pytest.raises(InvalidError) as caught:
        read_matchers(written, may_match_all=False)
    assert caught.value.faults[0].path == "$.matchers"


@settings(max_examples=50)
@given(
    st.sampled_from([label for label in LABELS if label not in KNOWN_VALUES]),
    st.sampled_from(["=", "!="]),
    st.text(max_size=60),
)
def test_any_literal_value_survives_writing_and_parsing(label, op, text):
    matcher = Matcher.parse({"label": label, "op": op, "value": text})

    assert Matcher.parse(str(matcher)) == matcher
    assert matcher.matches({label: text}) is (op == "=")
    assert matcher.matches({label: f"{text}x"}) is (op == "!=")


def test_equal_matchers_are_merged():
    assert len(read_matchers(["pool=chat", " pool = chat ", 'pool="chat"'], may_match_all=True)) == 1
