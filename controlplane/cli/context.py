"""Shared by all commands: the site, output as tables or JSON, parameter types, and following a rollout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from controlplane.cli.rest import RestClient, Site, find_site

# The columns of each resource's table; JSON output has all fields.
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
    "what-ifs": ("id", "pool", "state", "start", "end", "created_at"),
}
POLL_INTERVAL_S = 1.0  # between two requests while a rollout is followed
COMPLETE = "complete"


class Output:
    """Prints results: tables for people, JSON for scripts."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(soft_wrap=False, highlight=False)

    def rows(self, resource: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A list of objects."""
        if self.as_json:
            self.json(list(rows))
        elif not rows:
            click.echo(f"No {resource.replace('-', ' ')}.")
        else:
            columns = COLUMNS.get(resource) or tuple(rows[0])
            headers = [column.rpartition(".")[2] for column in columns]
            self.table(headers, [[format_value(_value_at(row, column)) for column in columns] for row in rows])

    def row(self, row: Mapping[str, Any]) -> None:
        """One object: a line for each field."""
        if self.as_json:
            self.json(row)
        else:
            self.table(["field", "value"], [[name, format_value(value)] for name, value in row.items()])

    def table(self, headers: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """A table. Values from the site are printed without markup and control characters, which move the cursor."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for header in headers:
            table.add_column(header.replace("_", " "), overflow="fold")
        for line in lines:
            table.add_row(
                *(Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in cell)) for cell in line)
            )
        self.console.print(table)

    def json(self, value: Any) -> None:
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))

    def message(self, sentence: str) -> None:
        """A message for people, on standard error, so that scripts read only JSON."""
        click.echo(sentence, err=True)

    def rollout(self, rollout: dict[str, Any]) -> None:
        """A rollout: its state, the metrics of its analysis with their limits, and its history."""
        if self.as_json:
            self.json(rollout)
            return
        self.console.print(rollout_summary(rollout), markup=False, soft_wrap=True)
        readings = ("name", "baseline", "canary", "limit", "verdict", "detail")
        for key, fields in (("readings", readings), ("history", ("at", "transition", "stage", "by", "reason"))):
            if rollout[key] or key == "history":
                self.table(fields, [[format_value(row[field]) for field in fields] for row in rollout[key]])


def _value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where it is missing."""
    value: Any = row
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def format_value(value: Any) -> str:
    """A value as text; unknown is a dash, never 0."""
    if value is None or value in ("", []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


class Document(click.ParamType[Any]):
    """A file in YAML, or JSON, which is YAML; ``-`` is standard input. Its top-level value has the given type."""

    name = "file"

    def __init__(self, kind: type, expected: str) -> None:
        self._kind, self._expected = kind, expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            document = yaml.safe_load(sys.stdin.read() if value == "-" else Path(value).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            self.fail(f"{value}: {error}", param, ctx)
        if not isinstance(document, self._kind):
            self.fail(f"{value}: expected {self._expected}.", param, ctx)
        return document


class Pair(click.ParamType[tuple[str, str]]):
    """NAME=VALUE."""

    name = "pair"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, equals, text = str(value).partition("=")
        if not equals:
            self.fail(f"{value!r}: expected NAME=VALUE", param, ctx)
        return name, text


class Context:
    """The site and the output of a command."""

    def __init__(self, url: str | None, token: str | None, *, as_json: bool) -> None:
        self._url, self._token = url, token
        self.output = Output(as_json=as_json)

    @cached_property
    def rest(self) -> RestClient:
        """A client of the configured site. UsageError without one."""
        return self.connect(find_site(self._url, self._token))

    def connect(self, site: Site, **options: float) -> RestClient:
        """A client of a site, closed when the command ends."""
        rest = RestClient(site, **options)
        click.get_current_context().call_on_close(rest.close)
        return rest


pass_context = click.make_pass_decorator(Context)


def watch(context: Context, rollout_id: int, *, timeout_s: float | None = None) -> dict[str, Any]:
    """The rollout after it ended, or after ``timeout_s``; meanwhile a line on standard error for each change."""
    deadline, shown = None if timeout_s is None else time.monotonic() + timeout_s, ""
    while True:
        rollout: dict[str, Any] = context.rest.get(f"rollouts/{rollout_id}")
        if (line := rollout_summary(rollout)) != shown:
            context.output.message(line)
            shown = line
        if rollout["finished_at"] or (deadline is not None and time.monotonic() > deadline):
            return rollout
        time.sleep(POLL_INTERVAL_S)


def rollout_summary(rollout: dict[str, Any]) -> str:
    """A rollout's state in one line."""
    state = str(rollout["state"]).replace("_", " ")
    parts = [f"{rollout['policy']} r{rollout['revision']}: {state}"]
    if rollout["stages"]:
        parts.append(f"step {rollout['stage'] + 1} of {len(rollout['stages'])}")
    parts += [
        f"{row['name']} {row['verdict']}" for row in rollout["readings"] if row["verdict"] not in {"passed", "off"}
    ]
    if routers := rollout["routers"]:
        acknowledged = sum(router["progress"] == "acknowledged" for router in routers)
        parts.append(f"{acknowledged} of {len(routers)} routers run it")
    if rollout["why"]:
        parts.append(rollout["why"])
    return "; ".join(parts)
