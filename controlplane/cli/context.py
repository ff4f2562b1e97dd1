"""Tables for people, JSON for scripts.

Files that commands read.

What every command is given.

Following a rollout until it is over.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from controlplane.cli.rest import Rest, Site, known_site

# What a table shows of each noun; everything is in the JSON.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "projects": ("name", "description"),
    "pools": ("name", "project", "models", "description"),
    "replicas": ("name", "pool", "state", "url", "weight"),
    "task-groups": ("id", "pool", "name", "owner", "replicas"),
    "policies": ("name", "live.number", "live.settings.strategy", "live.reason", "draft.number"),
    "revisions": ("id", "policy", "number", "state", "settings.strategy", "author", "reason", "published_at"),
    "rollouts": ("id", "policy", "revision", "state", "started_by", "started_at", "finished_at"),
    "routers": ("name", "running_number", "desired_number", "in_sync", "last_seen_at", "last_error"),
    "events": ("at", "kind", "actor", "summary"),
    "alerts": ("id", "state", "pool", "summary", "started_at"),
    "alert-rules": ("id", "pool", "name", "kind", "enabled"),
    "channels": ("id", "name", "kind", "enabled"),
    "deliveries": ("id", "channel", "state", "attempts", "created_at"),
    "tokens": ("id", "name", "user", "scopes", "expires_at", "last_used_at", "revoked_at"),
    "audit": ("number", "at", "actor", "kind", "summary", "reason"),
}


class Output:
    """How a command's answer is written."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(soft_wrap=False, highlight=False)

    def rows(self, noun: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A list."""
        if self.as_json:
            self.json(list(rows))
            return
        if not rows:
            click.echo(f"No {noun.replace('-', ' ')}.")
            return
        columns = COLUMNS.get(noun) or tuple(rows[0])
        self.table(
            [column.rpartition(".")[2] for column in columns], [[cell(row, one) for one in columns] for row in rows]
        )

    def row(self, row: Mapping[str, Any]) -> None:
        """One object: a line for each field."""
        if self.as_json:
            self.json(row)
        else:
            self.table(["field", "value"], [[name, text(value)] for name, value in row.items()])

    def table(self, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """A plain table; what comes from the site is never taken for markup."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in heads:
            table.add_column(head.replace("_", " "), overflow="fold")
        for line in lines:
            table.add_row(*(_printable(one) for one in line))
        self.console.print(table)

    def json(self, value: Any) -> None:
        """For scripts: always the whole value, and nothing else on the standard output."""
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))

    def say(self, sentence: str) -> None:
        """Something for people; on the error stream, so that scripts read JSON alone."""
        click.echo(sentence, err=True)


def cell(row: Mapping[str, Any], path: str) -> str:
    """The value at a dotted path."""
    value: Any = row
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return text(value)


def text(value: Any) -> str:
    """A value in words: unknown is a dash, never 0."""
    if value is None or value in ("", []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _printable(line: str) -> Text:
    """Without control characters, which could move a terminal's cursor; no markup."""
    return Text("".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in line))


class Document(click.ParamType[Any]):
    """A file in YAML, or in JSON, which is YAML; ``-`` is the standard input. Of the kind that is expected."""

    name = "file"

    def __init__(self, kind: type, what: str) -> None:
        self._kind, self._what = kind, what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What is in it; a usage error says what is wrong."""
        try:
            read = yaml.safe_load(sys.stdin.read() if value == "-" else Path(value).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            self.fail(f"{value}: {error}", param, ctx)
        if not isinstance(read, self._kind):
            self.fail(f"{value}: expected {self._what}.", param, ctx)
        return read


class Context:
    """The site and the output that were asked for."""

    def __init__(self, url: str | None, token: str | None, *, as_json: bool) -> None:
        self._url, self._token = url, token
        self.output = Output(as_json=as_json)

    @cached_property
    def rest(self) -> Rest:
        """The site, signed in; a UsageError where none is known."""
        return self.signed_in(known_site(self._url, self._token))

    def signed_in(self, site: Site, **options: float) -> Rest:
        """Another site, until the command is over."""
        rest = Rest(site, **options)
        click.get_current_context().call_on_close(rest.close)
        return rest


pass_context = click.make_pass_decorator(Context)


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
