"""Following a rollout until it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .output import Output, text
from .rest import Rest

INTERVAL_S = 1.0
DONE = "complete"

Show = Callable[[dict[str, Any]], None]


def watch(rest: Rest, output: Output, rollout_id: int, *, deadline_s: float | None = None) -> dict[str, Any]:
    """The rollout as it ended, or as it stands at the deadline; meanwhile its progress, on the error stream."""
    until = None if deadline_s is None else time.monotonic() + deadline_s
    with _shown(output) as show:
        while True:
            rollout: dict[str, Any] = rest.get(f"rollouts/{rollout_id}")
            show(rollout)
            if rollout["finished_at"] or (until is not None and time.monotonic() > until):
                return rollout
            time.sleep(INTERVAL_S)


def sentence(rollout: dict[str, Any]) -> str:
    """Where a rollout stands, in one line."""
    state = str(rollout["state"]).replace("_", " ")
    parts = [f"{rollout['policy']} r{rollout['revision']}: {state}"]
    if rollout["stages"]:
        parts.append(f"stage {rollout['stage'] + 1} of {len(rollout['stages'])}")
    parts += [
        f"{one['name']} {one['verdict']}" for one in rollout["readings"] if one["verdict"] not in {"passed", "off"}
    ]
    if routers := rollout["routers"]:
        parts.append(f"{_acknowledged(routers)} of {len(routers)} routers run it")
    if rollout["why"]:
        parts.append(rollout["why"])
    return "; ".join(parts)


def present(output: Output, rollout: dict[str, Any]) -> None:
    """A rollout: where it stands, what its guard read beside the limits, and every step."""
    if output.as_json:
        output.json(rollout)
        return
    output.console.print(sentence(rollout), markup=False, soft_wrap=True)
    if rollout["readings"]:
        _table(output, rollout["readings"], ("name", "baseline", "trial", "limit", "verdict", "detail"))
    _table(output, rollout["steps"], ("at", "move", "stage", "by", "reason"))


def _table(output: Output, rows: list[dict[str, Any]], fields: tuple[str, ...]) -> None:
    output.table(fields, [[text(one[field]) for field in fields] for one in rows])


def progress(rollout: dict[str, Any]) -> float:
    """How much of the way is behind it, 0 to 1: stages, and within one the routers that run it."""
    if rollout["state"] == DONE:
        return 1.0
    stages, routers = max(len(rollout["stages"]), 1), rollout["routers"]
    within = _acknowledged(routers) / len(routers) if routers else 0.0
    return min((int(rollout["stage"]) + within) / stages, 0.99)


def _acknowledged(routers: list[dict[str, Any]]) -> int:
    return sum(one["progress"] == "acknowledged" for one in routers)


@contextmanager
def _shown(output: Output) -> Iterator[Show]:
    """A bar for a terminal, a line for each change elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(output).show
        return
    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda rollout: bars.update(task, completed=progress(rollout), description=sentence(rollout))


class _Lines:
    def __init__(self, output: Output) -> None:
        self._output, self._last = output, ""

    def show(self, rollout: dict[str, Any]) -> None:
        line = sentence(rollout)
        if line != self._last:
            self._output.say(line)
            self._last = line
