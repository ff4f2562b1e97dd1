"""Rollout guard: ``python -m tests.benchmarks guard [--runs COUNT] [--jobs COUNT]``.

Synthetic requests of canaries with and without an effect, as routers record them, go through the product's own
analysis: each minute for a quarter of an hour, then every fourth minute of an hour. The tables have the share of
harmless canaries that are rolled back, and the share of harmful ones that are found within 15 minutes. Where less than
90 % are found, it has beside it what an oracle finds in the same requests: a test with a probability of 5 % of a false
alarm, made once at the end, that knows what each prompt, minute and replica would have had without the harm.

Traffic: 10 requests/s of 1 or 4 task groups. A group's prompts follow Zipf's law with exponent 1, and each has its own
hit rate (standard deviation 0.12), TTFT (log-normal, 0.3) and error ratio. A request's hit rate has a beta distribution
around that of its prompt. Sessions of 5 or 20 requests, five seconds apart on average, share prompt and replica, and
are similar beyond that. Every minute has its own hit rate and TTFT, and the time of the rollout others than the time
before.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.services.policies.rollout_plans import GuardLimits
from controlplane.services.policies.rollouts import NO_VERDICT, Verdict
from telemetry.guards.analysis import Measured, Requests, Side, analyze
from telemetry.guards.measurement import HISTORY_S

RATE = 10.0  # requests/s
MINUTES = (*range(3, 15), *range(15, 60, 4))  # of the analyses, after the warm-up
HOUR, WARM_UP, FOUND_BY = 60, 2, 15  # minutes
REPLICAS = 4
GROUP_HIT_RATES = (0.6, 0.3, 0.75, 0.5)
PROMPT_SD, SESSION_SD, MINUTE_SD = 0.12, 0.15, 0.03  # of hit rates
HIT_SCATTER = 0.5  # variance of requests' hit rates, of that if each is 0 or 1; 0.35 to 0.5 in recorded conversations
REQUEST_SD = 0.5  # of the log of a TTFT
FIRST_SEED = 9001
RUNS = 16  # of each scenario; half as many without an effect, which are three times as many and four times as long
MAX_FALSE, MIN_FOUND = 0.05, 0.9
SHARES, PROMPTS, GROUPS, SESSIONS = (0.05, 0.25, 0.5), (30, 200, 2000), (1, 4), (1, 5, 20)
SPLITS = ("group", "router")

Floats = NDArray[np.float64]


class Harm(NamedTuple):
    """What the canary's revision does."""

    name: str
    figure: str
    hit_rate: float = 0.0
    ttft: float = 1.0
    errors: float = 0.0


NONE = Harm("none", "")
HARMS = (
    Harm("10 points less hit rate", "hit_rate", hit_rate=-0.1),
    Harm("1.5 x TTFT", "ttft_p95_s", ttft=1.5),
    Harm("3 % more errors", "error_ratio", errors=0.03),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    split: str = "share"  # or "group" or "router"
    share: float = 0.25
    prompts: int = 200  # of a task group
    groups: int = 1
    session: int = 1  # requests
    drift: float = 0.0  # standard deviation by which a prompt's hit rate changes when the canary starts

    def __str__(self) -> str:
        what = f"{self.share:.0%} of prefixes" if self.split == "share" else f"one {self.split} of 4"
        return f"{what}, {self.groups} x {self.prompts} prompts"


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of all groups."""

    group: NDArray[np.int64]
    weight: Floats
    hit_rate: Floats
    slowness: Floats  # log of a factor
    error_ratio: Floats


HARMLESS = (
    *(Scenario("share", *each) for each in product(SHARES, PROMPTS, GROUPS, SESSIONS)),
    *(Scenario(split, 0.25, prompts, 4, session) for split, prompts, session in product(SPLITS, PROMPTS, SESSIONS)),
)
HARMFUL = (
    *(Scenario("share", *each) for each in product(SHARES, PROMPTS, GROUPS)),
    *(Scenario(split, 0.25, prompts, 4) for split, prompts in product(SPLITS, PROMPTS)),
)
# The rows of the first table: what the scenarios have in common.
ROWS: dict[str, Callable[[Scenario], bool]] = {
    **{f"{share:.0%} of prefixes": lambda s, share=share: s.split == "share" and s.share == share for share in SHARES},
    **{f"{prompts} prompts in a group": lambda s, prompts=prompts: s.prompts == prompts for prompts in PROMPTS},
    **{
        f"{groups} task group{'s' * (groups > 1)}": lambda s, groups=groups: s.split == "share" and s.groups == groups
        for groups in GROUPS
    },
    "independent requests": lambda s: s.session == 1,
    **{f"sessions of {size}": lambda s, size=size: s.session == size for size in SESSIONS[1:]},
    **{f"one {split} of 4": lambda s, split=split: s.split == split for split in SPLITS},
}


def main(arguments: Sequence[str] = ()) -> None:
    """Print both tables and whether the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks guard")
    parser.add_argument("--runs", type=int, default=RUNS, help="rollouts of each harm; half as many without")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        without = partial(harmless_runs, runs=math.ceil(options.runs / 2))
        harmless = dict(zip(HARMLESS, pool.map(without, HARMLESS), strict=True))
        pairs = list(product(HARMFUL, HARMS))
        found = dict(
            zip(pairs, pool.map(partial(harmful_runs, runs=options.runs), *zip(*pairs, strict=True)), strict=True)
        )
    print("Canaries without an effect, within an hour:\n")
    print("| canaries with | rollouts | rolled back | no verdict by hit rate |\n| --- | --- | --- | --- |")
    missed = []
    for name, is_in_row in ROWS.items():
        runs = [each for scenario, each in harmless.items() if is_in_row(scenario)]
        total, failed, unjudged = (
            sum(column) for column in zip(*((len(r), r.failed, r.unjudged) for r in runs), strict=True)
        )
        print(f"| {name} | {total} | {failed / total:.1%} | {unjudged / total:.0%} |")
        missed += [name] if failed > MAX_FALSE * total else []
    result = f"missed in {', '.join(missed)}" if missed else "met"
    print(f"\nGoal of at most {MAX_FALSE:.0%} rolled back in each row: {result}")
    print(f"\nHarmful canaries found within {FOUND_BY} minutes, and the median minute:\n")
    print(f"| canary | {' | '.join(harm.name for harm in HARMS)} |\n| --- | {' | '.join('---' for _ in HARMS)} |")
    for scenario in HARMFUL:
        print(f"| {scenario} | {' | '.join(str(found[scenario, harm]) for harm in HARMS)} |")
    possible = [runs for runs in found.values() if runs.oracle >= MIN_FOUND]
    reached = sum(runs.failed >= MIN_FOUND * len(runs) for runs in possible)
    print(f"\n{MIN_FOUND:.0%} reached in {reached} of {len(possible)} where an oracle reaches it, {len(found)} in all")
    print(f"{time.perf_counter() - started:.0f} s")


class Runs(NamedTuple):
    """Results of a scenario's rollouts."""

    count: int
    failed: int  # rolled back; of a harm: because of its figure
    unjudged: int  # without a verdict by hit rate, or by the harm's figure, when they ended
    oracle: float = 0.0  # share that an oracle finds
    minute: float = 0.0  # of the stage in which half of those that failed had

    def __len__(self) -> int:
        return self.count

    def __str__(self) -> str:
        text = f"{self.failed / self.count:.0%}" + (f", {self.minute:.0f} min" if self.failed else "")
        if self.failed >= MIN_FOUND * self.count:
            return text
        without = f"no verdict {self.unjudged / self.count:.0%}, " if self.unjudged else ""
        return f"{text} ({without}oracle {self.oracle:.0%})"


def harmless_runs(scenario: Scenario, *, runs: int, first_seed: int = FIRST_SEED) -> Runs:
    """Rollouts of canaries without an effect."""
    ends = [run(scenario, NONE, seed).analyses[-1] for seed in range(first_seed, first_seed + runs)]
    return Runs(
        runs, sum(end[""] == Verdict.FAILED for end in ends), sum(end["hit_rate"] == NO_VERDICT for end in ends)
    )


def harmful_runs(scenario: Scenario, harm: Harm, *, runs: int, first_seed: int = FIRST_SEED) -> Runs:
    """Rollouts of canaries with an effect."""
    played = [run(scenario, harm, seed, FOUND_BY) for seed in range(first_seed, first_seed + runs)]
    ends = [each.analyses[-1][harm.figure] for each in played]
    found = [
        WARM_UP + MINUTES[len(each.analyses) - 1] for each, end in zip(played, ends, strict=True) if end == "failed"
    ]
    oracle = statistics.fmean(each.oracle for each in played)
    return Runs(runs, len(found), ends.count(NO_VERDICT), oracle, statistics.median(found) if found else 0.0)


class Rollout(NamedTuple):
    """What became of one rollout."""

    analyses: list[dict[str, str]]  # the verdict of each figure at each analysis until the canary is rolled back
    oracle: float  # probability that an oracle finds the harm


def run(scenario: Scenario, harm: Harm, seed: int, minutes: int = HOUR) -> Rollout:
    """One rollout."""
    rng = np.random.default_rng(seed)
    prompts = _prompts(scenario, rng)
    is_canary = rng.random(len(prompts.weight)) < scenario.share if scenario.split == "share" else prompts.group == 0
    before = _hour(scenario, prompts, is_canary, NONE, rng, int(HISTORY_S / 60))
    drifted = replace(prompts, hit_rate=prompts.hit_rate + rng.normal(0, scenario.drift, len(prompts.weight)))
    now = _hour(scenario, drifted, is_canary, harm, rng, minutes - WARM_UP)
    limits = GuardLimits()
    analyses = []
    for minute in (minute for minute in MINUTES if minute <= minutes - WARM_UP):
        until = [period.take(slice(int(np.searchsorted(period.bins, minute)))) for period in now]
        sides = map(Side, until, before)
        measured = Measured(*sides, scenario.split == "share", has_common_prompts=scenario.split == "router")
        verdict, figures = analyze(limits, measured)
        analyses.append({figure["name"]: figure["verdict"] for figure in figures} | {"": verdict})
        if verdict is Verdict.FAILED:
            break
    return Rollout(analyses, _oracle(harm, prompts, now[0].prompts))


def _oracle(harm: Harm, prompts: Prompts, of_requests: NDArray[np.int64]) -> float:
    """Probability with which an oracle finds the harm in requests of these prompts."""
    count, normal = len(of_requests), statistics.NormalDist()
    if not count or not harm.figure:
        return 0.0
    if harm.errors:
        usual = float(prompts.error_ratio[of_requests].sum())
        least = next(events for events in range(count + 1) if _poisson_from(events, usual) <= MAX_FALSE)
        return _poisson_from(least, usual + harm.errors * count)
    chance = prompts.hit_rate[of_requests].clip(0.01, 0.99)
    scatter = HIT_SCATTER * float((chance * (1 - chance)).sum()) if harm.hit_rate else REQUEST_SD**2 * count
    error = math.sqrt(scatter)
    return normal.cdf(count * abs(harm.hit_rate or math.log(harm.ttft)) / error - normal.inv_cdf(1 - MAX_FALSE))


def _poisson_from(least: int, mean: float) -> float:
    """Probability of at least so many events."""
    return 1 - math.fsum(math.exp(events * math.log(mean) - mean - math.lgamma(events + 1)) for events in range(least))


def _prompts(scenario: Scenario, rng: np.random.Generator) -> Prompts:
    count = scenario.prompts * scenario.groups
    group = np.repeat(np.arange(scenario.groups), scenario.prompts)
    weight = 1 / np.tile(np.arange(1, scenario.prompts + 1), scenario.groups)
    return Prompts(
        group,
        weight / weight.sum(),
        np.array(GROUP_HIT_RATES)[group] + rng.normal(0, PROMPT_SD, count),
        rng.normal(0, 0.3, count),
        rng.exponential(0.003, count),
    )


def _hour(
    scenario: Scenario,
    prompts: Prompts,
    of_canary: NDArray[np.bool_],
    harm: Harm,
    rng: np.random.Generator,
    length: int,
) -> tuple[Requests, Requests]:
    """Requests of canary and baseline in ``length`` minutes."""
    size, lead_in_s = scenario.session, 5.0 * scenario.session
    sessions = rng.poisson(RATE / size * (length * 60 + lead_in_s))
    start = rng.uniform(-lead_in_s, length * 60, sessions)
    at = (start[:, None] + np.cumsum(rng.exponential(5.0, (sessions, size)), axis=1) - 5.0).ravel()
    order = np.argsort(at)
    order = order[(at[order] >= 0) & (at[order] < length * 60)]
    session = np.repeat(np.arange(sessions), size)[order]
    minute = (at[order] // 60).astype(np.int64)
    prompt = rng.choice(len(prompts.weight), sessions, p=prompts.weight)[session]
    replica = rng.integers(0, REPLICAS, sessions)[session]
    on_canary = of_canary[prompt] if scenario.split != "router" else (rng.random(sessions) < 1 / 4)[session]
    effect = on_canary * 1.0
    count = len(session)

    similar = (lambda sd: rng.normal(0, sd, sessions)[session]) if size > 1 else (lambda sd: 0.0)  # noqa: ARG005
    level = prompts.hit_rate[prompt] + similar(SESSION_SD) + rng.normal(0, MINUTE_SD, length)[minute]
    level = (level + rng.normal(0, 0.03) + harm.hit_rate * effect).clip(0.01, 0.99)
    hit = rng.beta(*(part * (1 / HIT_SCATTER - 1) for part in (level, 1 - level)))
    tokens = np.rint(rng.lognormal(7.0, 0.8, count))
    slowness = prompts.slowness[prompt] + similar(0.3) + rng.normal(0, 0.1, length)[minute]
    slowness += rng.normal(0, 0.1, REPLICAS)[replica] + rng.normal(0, 0.15) - 0.5 * hit
    ttft = 0.4 * np.exp(slowness + rng.normal(0, REQUEST_SD, count)) * harm.ttft**effect
    errors = prompts.error_ratio[prompt] + harm.errors * effect
    if size > 1:
        errors = errors + 0.3 * (rng.random(sessions) < 0.01)[session]
    failed = rng.random(count) < errors
    ok = ~failed
    requests = Requests(
        minute,
        prompt,
        np.ones(count),
        failed * 1.0,
        tokens * ok,
        tokens * hit * ok,
        np.where(ok, ttft, np.nan),
        np.full(count, np.nan),
    )
    return requests.take(on_canary), requests.take(~on_canary)
