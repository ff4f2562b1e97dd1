"""Predicted against measured: ``python -m tests.benchmarks what_if [--minutes 5] [--replica URL ...] [--trace FILE]``.

Runs the demo stack, or real replicas, with the demo's generated traffic or that of a trace, under ``round_robin``. Then
two what-ifs run at once, and the benchmark records how late alert rules are evaluated meanwhile. Then it publishes the
candidate, and compares what the router measured with the prediction. Measured figures come from the router's own
counters, so that they do not depend on the code that predicts.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.live_stack import LiveStack

HIT_POINTS, TTFT_RATIO = 3.0, 0.20  # limits of a correct prediction
LATE_S = 5.0  # rules are evaluated every few seconds; this much more is late
SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)", re.MULTILINE)
BOUND = re.compile(r'le="([^"]+)"')


class Counters:
    """Sums over all series of a router's prompt and cached tokens, requests and TTFT buckets at one time."""

    def __init__(self, exposition: str) -> None:
        self.sums: dict[str, float] = {}
        self.buckets: dict[float, float] = {}  # requests by upper bound in seconds, cumulative
        for name, labels, value in SAMPLE.findall(exposition):
            if name.endswith("_ttft_seconds_bucket") and "policy" not in name and "reuse" not in name:
                bound = BOUND.search(labels)
                if bound is not None:
                    key = float(bound.group(1))
                    self.buckets[key] = self.buckets.get(key, 0.0) + float(value)
            elif not name.endswith("_bucket"):
                self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def of(self, suffix: str) -> float:
        """The sum of the counter ``warmpath_router_<suffix>``."""
        return next((value for name, value in self.sums.items() if name == f"warmpath_router_{suffix}"), 0.0)


def measured(before: Counters, after: Counters) -> dict[str, float]:
    """Hit rate, TTFT p50 and p95 in seconds, and the requests with a TTFT, between two readings."""
    prompt = after.of("prompt_tokens_total") - before.of("prompt_tokens_total")
    cached = after.of("cached_tokens_total") - before.of("cached_tokens_total")
    counts = [(bound, after.buckets[bound] - before.buckets.get(bound, 0.0)) for bound in sorted(after.buckets)]
    total = counts[-1][1] if counts else 0.0
    return {
        "hit_rate": cached / prompt if prompt else float("nan"),
        "ttft_p50_s": _quantile(counts, 0.50),
        "ttft_p95_s": _quantile(counts, 0.95),
        "requests": total,
    }


def _quantile(counts: Sequence[tuple[float, float]], share: float) -> float:
    """A quantile of cumulative buckets, interpolated within its bucket."""
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= share * counts[-1][1] > below:
            return lower + (bound - lower) * (share * counts[-1][1] - below) / (count - below)
        lower, below = bound, count
    return float("nan")


class Bench:
    """One stack and its REST client."""

    def __init__(self, stack: LiveStack, rest: httpx.Client, options: argparse.Namespace) -> None:
        self.stack, self.rest, self.options = stack, rest, options

    def publish(self, strategy: str) -> None:
        settings = {"settings": {"strategy": strategy}}
        self.rest.put("policies/default/draft", json=settings).raise_for_status()
        reason = {"reason": "A measurement of predictions"}
        self.rest.post("policies/default/publish", json=reason).raise_for_status()

    def counters(self) -> Counters:
        return Counters(httpx.get(f"http://127.0.0.1:{self.stack.admin_port}/metrics", timeout=10).text)

    def measure(self, minutes: float) -> dict[str, float]:
        before = self.counters()
        time.sleep(60 * minutes)
        return measured(before, self.counters())

    def evaluation_age_s(self) -> float:
        """Seconds since alert rules were last evaluated."""
        text = self.rest.get(f"{self.stack.web}/metrics").raise_for_status().text
        found = re.search(r"^warmpath_controlplane_evaluation_age_seconds(?:\{[^}]*\})? (\S+)", text, re.MULTILINE)
        if found is None:
            raise RuntimeError("the web process exposes no warmpath_controlplane_evaluation_age_seconds")
        return float(found.group(1))

    def oldest_while(self, goes_on: Callable[[], bool]) -> float:
        """The highest age of the last evaluation while a condition holds."""
        oldest = 0.0
        while goes_on():
            oldest = max(oldest, self.evaluation_age_s())
            time.sleep(0.25)
        return oldest

    def start_what_if(self) -> int:
        candidate = {"name": self.options.strategy, "settings": {"strategy": self.options.strategy}}
        body = {"pool": "default", "candidates": [candidate]}
        return int(self.rest.post("what-ifs", json=body).raise_for_status().json()["id"])

    def what_if(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.rest.get(f"what-ifs/{number}").raise_for_status().json()
        return found

    def is_open(self, number: int) -> bool:
        return self.what_if(number)["state"] in {"queued", "running"}


def main(argv: Sequence[str] = ()) -> None:
    """Print predicted and measured figures; exit status 1 if a limit is missed."""
    options = _options(argv)
    environment = {"WARMPATH_REPLICAS": ",".join(options.replica), "WARMPATH_TRAFFIC": "1"} if options.replica else {}
    if options.trace:
        environment["WARMPATH_TRACE"] = str(options.trace.resolve())
    with tempfile.TemporaryDirectory(prefix="wpb-") as data_dir:
        stack = LiveStack(Path(data_dir), **environment)
        try:
            stack.start(within_s=180)
            with stack.rest() as rest:
                is_right = _compare(Bench(stack, rest, options))
            stack.interrupt()
        finally:
            stack.kill()
    if not is_right:
        sys.exit(1)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks what_if", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="under each policy")
    parser.add_argument("--settle", type=float, default=2.0, help="minutes after the change that are not measured")
    parser.add_argument("--strategy", default="lowest_cost", help="the candidate")
    parser.add_argument("--replica", action="append", default=[], metavar="URL", help="a real replica; once for each")
    parser.add_argument("--trace", type=Path, help="traffic in Mooncake's format, such as real replicas can take")
    return parser.parse_args(argv)


def _compare(bench: Bench) -> bool:
    if bench.options.replica:
        bench.publish("round_robin")
    before = bench.measure(bench.options.minutes)
    idle_until = time.monotonic() + 30
    idle_s = bench.oldest_while(lambda: time.monotonic() < idle_until)
    started = time.monotonic()
    numbers = [bench.start_what_if(), bench.start_what_if()]
    busy_s = bench.oldest_while(lambda: any(bench.is_open(number) for number in numbers))
    took_s = time.monotonic() - started
    ended = bench.what_if(numbers[-1])
    bench.publish(bench.options.strategy)
    time.sleep(60 * bench.options.settle)
    after = bench.measure(bench.options.minutes)
    print(f"two what-ifs at once took {took_s:.0f} s")
    print(f"longest time without an evaluation of alert rules: {idle_s:.1f} s before, {busy_s:.1f} s meanwhile")
    if ended["state"] != "done":
        print(f"the what-if {ended['state']}: {ended['reason']}")
        return False
    return _report(ended["result"], before, after) and busy_s <= idle_s + LATE_S


def _report(result: dict[str, Any], before: dict[str, float], after: dict[str, float]) -> bool:
    active, candidate = (row["figures"] for row in result["candidates"][:2])
    is_calibrated = result["calibration"]["is_calibrated"]
    print(f"calibrated: {is_calibrated} {'; '.join(result['calibration']['problems'])}")
    print(f"{'':28}{'hit rate %':>11}{'TTFT p50 s':>12}{'p95 s':>9}{'requests':>10}")
    for name, row in (
        ("before, measured", before),
        ("before, replayed", active),
        ("candidate, predicted", candidate),
        ("candidate, became", after),
    ):
        count = f"{row['requests']:.0f}" if "requests" in row else ""
        print(f"{name:28}{100 * row['hit_rate']:11.1f}{row['ttft_p50_s']:12.3f}{row['ttft_p95_s']:9.3f}{count:>10}")
    points = 100 * (candidate["hit_rate"] - after["hit_rate"])
    ratio = candidate["ttft_p50_s"] / after["ttft_p50_s"] - 1
    print(f"error: {points:+.1f} points of hit rate (limit {HIT_POINTS:g}), {ratio:+.0%} of TTFT p50 (limit 20 %)")
    return bool(is_calibrated) and abs(points) <= HIT_POINTS and abs(ratio) <= TTFT_RATIO


if __name__ == "__main__":
    main(sys.argv[1:])
