"""Our counters' arithmetic beside Prometheus' own: promtool evaluates the same samples with ``increase``.

``increase`` extrapolates to its window's edges. Debian's Prometheus closes a window on both sides, so that one whose
edges are samples is not extrapolated at all, and both must agree to the last token. A reset that only one of two
counters shows is where they differ on purpose: Prometheus looks at each series by itself, we at the pair (H8).
"""

import json
import random
import subprocess
from itertools import pairwise

import pytest

from telemetry.metrics.counters import RawCounters, increase
from tests.fakes.real_prometheus import program

INTERVAL_S = 10
GOLDEN = {
    "restart": [(100_000, 90_000), (101_000, 90_800), (500, 100), (1500, 500)],
    "long-lived, bad hour": [(1_000_000, 900_000), (1_010_000, 900_500)],
    "idle": [(5, 2), (5, 2), (5, 2)],
}


def random_lives(seed):
    """Samples of a process that restarts now and then; both counters fall at once, and visibly."""
    dice = random.Random(seed)
    queries = hits = dice.randrange(1000, 10_000)
    samples = []
    for _ in range(30):
        if dice.random() < 0.15:
            queries, hits = dice.randrange(min(queries, 50) + 1), 0
            hits = min(hits, queries)
        else:
            more = dice.randrange(1, 5000)
            queries, hits = queries + more, hits + dice.randrange(more)
        samples.append((queries, hits))
    return samples


def ours(samples):
    """What our readings add up to."""
    scrapes = [
        RawCounters(number * INTERVAL_S, number * INTERVAL_S, {"queries": queries, "hits": hits})
        for number, (queries, hits) in enumerate(samples)
    ]
    increases = [increase(before, now, interval_s=INTERVAL_S) for before, now in pairwise(scrapes)]
    return tuple(sum(added.counters[name] for added in increases) for name in ("queries", "hits"))


def rule_test(name, samples, expected):
    """A test of promtool's for one vector: both increases over all of it."""
    span_s = (len(samples) - 1) * INTERVAL_S
    series = [
        {"series": f"vllm:prefix_cache_{counter}_total", "values": " ".join(str(sample[place]) for sample in samples)}
        for place, counter in enumerate(("queries", "hits"))
    ]
    asked = [
        {
            "expr": f"increase(vllm:prefix_cache_{counter}_total[{span_s}s])",
            "eval_time": f"{span_s}s",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for counter, value in zip(("queries", "hits"), expected, strict=True)
    ]
    return {"name": name, "interval": f"{INTERVAL_S}s", "input_series": series, "promql_expr_test": asked}


def promtool(tmp_path, tests):
    """promtool's verdict: (did all pass, what it printed)."""
    document = tmp_path / "rules_test.yml"
    document.write_text(json.dumps({"evaluation_interval": f"{INTERVAL_S}s", "tests": tests}))
    command = [program("promtool"), "test", "rules", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def test_prometheus_counts_what_we_count(tmp_path):
    """H8, H10: the golden vectors and 40 seeded lives of a process, in one run."""
    vectors = GOLDEN | {f"seed {seed}": random_lives(seed) for seed in range(40)}

    passed, said = promtool(tmp_path, [rule_test(name, samples, ours(samples)) for name, samples in vectors.items()])

    assert passed, said


def test_the_oracle_notices_a_token_too_many(tmp_path):
    samples = GOLDEN["restart"]
    queries, hits = ours(samples)

    passed, _ = promtool(tmp_path, [rule_test("wrong", samples, (queries + 1, hits))])

    assert not passed


def test_a_reset_that_one_counter_hides_is_ours_to_see(tmp_path):
    """H8: per series Prometheus takes 890 hits for one life; paired they are 10 and 600."""
    samples = [(1000, 10), (1500, 20), (900, 600)]

    passed, said = promtool(tmp_path, [rule_test("hidden", samples, (1400, 590))])

    assert passed, said
    assert ours(samples) == (1400, 610)
    assert ours(samples)[1] / ours(samples)[0] == pytest.approx(0.4357, abs=1e-4)
