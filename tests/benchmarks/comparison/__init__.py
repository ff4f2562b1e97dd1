"""Our router and those that users would pick instead, live: ``python -m tests.benchmarks peers`` (``make peers``).

For each workload (``workloads.py``) the same requests are played through each router (``routers.py``), one after the
other, before stand-ins that start with cold caches, or before ``--replicas``. A run (``runs.py``) is refused if the
client was late or a router or an engine was CPU-bound; the exit status is 1 then. The results are in
``.peers/results.json``; ``--record`` makes them ``docs/comparison.json`` and the tables of ``docs/comparison.md``.
By default about 50 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import uvloop

from tests.benchmarks.comparison.routers import PEERS, ROUTERS, Router, Stand, environment, install
from tests.benchmarks.comparison.runs import Engines, given, measure, ready
from tests.benchmarks.comparison.workloads import ENGINES, WORKLOADS, Request, Workload, requests_of
from tests.benchmarks.literature import write
from tests.benchmarks.proxy import NotListeningError

ROOT = Path(__file__).parents[3]
PAGE, RECORD = ROOT / "docs" / "comparison.md", ROOT / "docs" / "comparison.json"
OUTPUT = ROOT / ".peers" / "results.json"
Cell = dict[str, Any]
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "hit %": (("hit_percent",), "{:.1f}"),
    "TTFT mean, s": (("ttft_mean_s",), "{:.3f}"),
    "p50": (("ttft_p50_s",), "{:.3f}"),
    "p99": (("ttft_p99_s",), "{:.3f}"),
    "errors / unfinished": (("errors", "unfinished"), "{:.0f}"),
    "load max / mean": (("max_to_mean",), "{:.2f}"),
    "CPU, ms a request": (("cpu_ms",), "{:.1f}"),
    "RSS, MiB": (("memory_mib",), "{:.0f}"),
}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks peers")
    add, defaults = parser.add_argument, [name for name, router in ROUTERS.items() if router.is_default]
    add("--routers", nargs="+", choices=(*ROUTERS, "all"), default=defaults, metavar="NAME", help=", ".join(ROUTERS))
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS))
    add("--seconds", type=float, default=90.0, help="of each run (default %(default)s)")
    add("--repeat", type=int, default=1, help="runs of each router and workload, with another seed each")
    add("--engines", type=int, default=ENGINES, help="stand-ins (default %(default)s)")
    add("--replicas", nargs="+", metavar="URL", help="running replicas of a model that is served as `tiny`")
    add("--trace", type=Path, help="a trace in Mooncake's format instead of the workloads' own")
    add("--record", action="store_true", help="measure nothing: make the latest results those of docs/comparison.md")
    options = parser.parse_args(arguments)
    options.engines = len(options.replicas or ()) or options.engines
    if not options.record:
        with patch.dict(os.environ, PATH=f"{PEERS / 'bin'}:{os.environ['PATH']}"):
            compare(installed(options.routers), options)
    result = json.loads(OUTPUT.read_text())
    print(*("\n".join(["", *lines]) for lines in tables_of(result).values() if lines), sep="\n")
    if options.record:
        shutil.copy(OUTPUT, RECORD)
        write(page_tables(result), [PAGE])
    if any(cell["refused"] for cell in result["cells"]):
        raise SystemExit(1)


def installed(names: Sequence[str]) -> dict[str, Router]:
    """The chosen routers; prints their configurations, and what is left out."""
    routers = {name: router for name, router in ROUTERS.items() if name in names or "all" in names}
    for sentence in install({router.program for router in routers.values()}):
        print(sentence)
    for name, router in list(routers.items()):
        if router.program and not shutil.which(router.program):
            print(f"{name} is left out: {router.program} is not installed")
            del routers[name]
        else:
            print(f"{name} ({router.version()}): {router.configuration} ({router.reason})")
    return routers


def compare(routers: dict[str, Router], options: argparse.Namespace) -> None:
    """All runs. They are written after each, so that an interrupted comparison is not lost."""
    result = {"cores": os.cpu_count(), "seconds": options.seconds, "engines": options.engines}
    result["trace"] = options.trace and options.trace.name
    result["versions"] = {name: router.version() for name, router in routers.items()}
    cells: list[Cell] = []
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    for repeat in range(options.repeat):
        for name in options.workloads:
            workload = WORKLOADS[name]
            requests = requests_of(workload, options.seconds, 1 + repeat, options.engines, options.trace)
            for router_name, router in routers.items():
                if not router.takes_part(workload, are_given=bool(options.replicas)):
                    continue
                figures = run(workload, requests, router, options)
                cells.append({"workload": name, "router": router_name, **figures})
                print(json.dumps(cells[-1]), flush=True)
                OUTPUT.write_text(json.dumps({**result, "cells": cells}, indent=1, default=str) + "\n")


def run(workload: Workload, requests: Sequence[Request], router: Router, options: argparse.Namespace) -> Cell:
    """One run. If it fails, it is refused, and the others go on; its error is printed, and only its kind is kept."""
    step = "the replicas did not start"
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            started = None if options.replicas else Engines(stack, options.engines, workload.engine_options())
            engines = started.all if started else given(options.replicas)
            loss = started.lose_one if started and workload.loses_engine else None
            step = "it did not start"
            are_several_of_ours = workload.instances > 1 and not router.program
            variables = stack.enter_context(environment(folder, share_state=are_several_of_ours))
            proxies = []
            for instance in range(workload.instances):
                (own := folder / f"{instance}").mkdir()
                proxies.append(stack.enter_context(router.start(Stand(own, engines, variables))))
                uvloop.run(ready(proxies[-1].port))
            step = "the run failed"
            return uvloop.run(measure(requests, proxies, engines, loss))
    except Exception as error:  # noqa: BLE001 - one fault must not end an hour of runs
        traceback.print_exc()
        reason = str(error) if isinstance(error, NotListeningError) else type(error).__name__
        return {"refused": [f"{step}: {reason}"]}


# --- tables -------------------------------------------------------------------------------------------


def tables_of(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lines of each table of the page."""
    tables = {name: list(_table(workload.title, name, result["cells"])) for name, workload in WORKLOADS.items()}
    return {"routers": list(_routers(result["versions"])), **tables}


def page_tables(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """The tables, with a sentence in place of one without rows."""
    return {name: rows or [f"{name}: not measured yet, run `make peers`."] for name, rows in tables_of(result).items()}


def _routers(versions: Mapping[str, str]) -> Iterator[str]:
    yield from ("| router | version | configuration | why |", "| --- | --- | --- | --- |") if versions else ()
    for name, version in versions.items():
        yield f"| {name} | {version} | `{ROUTERS[name].configuration}` | {ROUTERS[name].reason} |"


def _table(title: str, workload: str, cells: Sequence[Cell]) -> Iterator[str]:
    """Best mean TTFT first; routers of which every run was refused last."""
    all_runs: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell["workload"] == workload:
            all_runs[cell["router"]].append(cell)
    valid = {router: [run for run in runs if not run["refused"]] for router, runs in all_runs.items()}
    refused = sorted(router for router, runs in valid.items() if not runs)
    if all_runs:
        yield f"| {title} | {' | '.join(COLUMNS)} |"
        yield "| --- " * (len(COLUMNS) + 1) + "|"
    for router in sorted(valid.keys() - refused, key=lambda router: mean(run["ttft_mean_s"] for run in valid[router])):
        runs, count = valid[router], len(all_runs[router])
        label = router if len(runs) == count else f"{router} ({len(runs)} of {count} runs)"
        yield f"| {label} | {' | '.join(_text(runs, *column) for column in COLUMNS.values())} |"
    for router in refused:
        yield f"| {router} | refused: {'; '.join(all_runs[router][-1]['refused'])} {'| ' * len(COLUMNS)}|"


def _text(runs: Sequence[Cell], names: Sequence[str], form: str) -> str:
    """Mean of the runs, with the lowest and the highest of several."""
    texts = []
    for name in names:
        values = [run[name] for run in runs]
        interval = f" ({form.format(min(values))}-{form.format(max(values))})" if len(values) > 1 else ""
        texts.append(form.format(mean(values)) + interval)
    return " / ".join(texts)
