"""Tables for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
