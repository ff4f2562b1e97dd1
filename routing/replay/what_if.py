"""``python -m routing what-if JOB RESULT``: replays captured requests under several scenarios, for the control plane.

Progress is written to standard output, one JSON object per line: ``{"done": requests, "of": requests}`` over all
scenarios. The result file is written at the end, by rename. The process stops when its standard input closes, which
happens when its parent exits, and runs at a low priority, so that it never delays the work of the parent.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from routing.replay.block_runs import Forest, ForestError
from routing.replay.captured import CapturedColumns, CapturedPlacer
from routing.replay.job import Job, Scenario, ScenarioResult, captured_columns, encode, engine_config, read_job
from routing.replay.replay import RequestTooLargeError, replay
from routing.types import NoReplicaError

NICENESS = 10


def main(argv: Sequence[str]) -> int:
    """Replay a job; exit status 2 with one line on standard error if it cannot be read."""
    if len(argv) != 2:
        sys.stderr.write("usage: python -m routing what-if JOB RESULT\n")
        return 2
    job_path, result_path = Path(argv[0]), Path(argv[1])
    os.nice(NICENESS)
    gc.disable()  # a replay creates no reference cycles
    try:
        job = read_job(job_path)
        results = replay_job(job, _show)
    except (OSError, msgspec.MsgspecError, ForestError) as error:
        sys.stderr.write(f"what-if: {error}\n")
        return 2
    partial = result_path.with_suffix(".part")
    partial.write_bytes(encode(results))
    partial.replace(result_path)
    return 0


def replay_job(job: Job, show: Callable[[int, int], None]) -> list[ScenarioResult]:
    """Replay every scenario; ``show(done, of)`` is called about every 10,000 requests."""
    captured = captured_columns(job)
    forest = Forest(captured.columns, has_output_ids=True)
    count = len(captured.columns)
    results = []
    for number, scenario in enumerate(job.scenarios):
        done = number * count

        def progress(index: int, done: int = done) -> None:
            show(done + index, count * len(job.scenarios))

        results.append(_replay_scenario(job, scenario, captured, forest, progress))
    show(count * len(job.scenarios), count * len(job.scenarios))
    return results


def _replay_scenario(
    job: Job, scenario: Scenario, captured: CapturedColumns, forest: Forest, progress: Callable[[int], None]
) -> ScenarioResult:
    targets = [engine.target for engine in scenario.engines]
    configs = [engine_config(engine, job.block_tokens) for engine in scenario.engines]
    try:
        placer = CapturedPlacer(captured, scenario.pool, targets, scenario.routers)
        outcome = replay(forest, configs, placer, progress=progress)
    except RequestTooLargeError as error:
        return ScenarioResult(scenario.name, f"The cache of a replica is too small: {error}.")
    except NoReplicaError as error:
        return ScenarioResult(scenario.name, f"No replica is eligible for some requests: {error}.")
    return ScenarioResult(
        scenario.name,
        ttft_s=outcome.ttft_s.tobytes(),
        cached_tokens=outcome.cached_tokens.tobytes(),
        engine=outcome.placements.tobytes(),
        reasons={reason.value: count for reason, count in placer.reasons.most_common()},
        evicted_blocks=outcome.evicted_blocks,
        overloaded=outcome.overloaded,
    )


def _show(done: int, of: int) -> None:
    """Report progress; end the process if its parent has exited."""
    sys.stdout.write(json.dumps({"done": done, "of": of}) + "\n")
    sys.stdout.flush()
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    if readable and not os.read(sys.stdin.fileno(), 1):
        raise SystemExit(3)
