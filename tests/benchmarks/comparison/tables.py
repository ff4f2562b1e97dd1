"""Tables of ``docs/comparison.md`` from the runs that ``docs/comparison.json`` records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tests.benchmarks.comparison.routers import ROUTERS
from tests.benchmarks.comparison.workloads import WORKLOADS

ROOT = Path(__file__).parents[3]
PAGE, RECORD = ROOT / "docs" / "comparison.md", ROOT / "docs" / "comparison.json"
Cell = dict[str, Any]
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "hit %": (("hit_percent",), "{:.1f}"),
    "TTFT mean, s": (("ttft_mean_s",), "{:.2f}"),
    "p50": (("ttft_p50_s",), "{:.2f}"),
    "p99": (("ttft_p99_s",), "{:.2f}"),
    "errors / unfinished": (("errors", "unfinished"), "{:.0f}"),
    "load max / mean": (("max_to_mean",), "{:.2f}"),
    "CPU, ms a request": (("cpu_ms",), "{:.1f}"),
    "RSS, MiB": (("memory_mib",), "{:.0f}"),
}


def tables_of(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lines of each table of the page."""
    tables = {name: list(_table(workload.title, name, result["cells"])) for name, workload in WORKLOADS.items()}
    return {"routers": list(_routers(result["versions"])), **tables}


def _routers(versions: Mapping[str, str]) -> Iterator[str]:
    yield "| router | version | configuration | why |"
    yield "| --- | --- | --- | --- |"
    for name, version in versions.items():
        yield f"| {name} | {version} | `{ROUTERS[name].configuration}` | {ROUTERS[name].reason} |"


def _table(title: str, workload: str, cells: Sequence[Cell]) -> Iterator[str]:
    """Best mean TTFT first; runs that were refused last."""
    valid: defaultdict[str, list[Cell]] = defaultdict(list)
    refused: dict[str, str] = {}
    for cell in cells:
        if cell["workload"] == workload:
            if cell["refused"]:
                refused[cell["router"]] = "; ".join(cell["refused"])
            else:
                valid[cell["router"]].append(cell)
    if valid or refused:
        yield f"| {title} | {' | '.join(COLUMNS)} |"
        yield "| --- " * (len(COLUMNS) + 1) + "|"
    for router, runs in sorted(valid.items(), key=lambda row: mean(run["ttft_mean_s"] for run in row[1])):
        yield f"| {router} | {' | '.join(_text(runs, *column) for column in COLUMNS.values())} |"
    for router in sorted(refused.keys() - valid.keys()):
        yield f"| {router} | refused: {refused[router]} {'| ' * len(COLUMNS)}|"


def _text(runs: Sequence[Cell], names: Sequence[str], form: str) -> str:
    """Mean of the runs, with the lowest and the highest of several."""
    texts = []
    for name in names:
        values = [run[name] for run in runs]
        interval = f" ({form.format(min(values))}-{form.format(max(values))})" if len(values) > 1 else ""
        texts.append(form.format(mean(values)) + interval)
    return " / ".join(texts)
