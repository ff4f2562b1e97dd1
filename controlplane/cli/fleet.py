"""Looking at the fleet, and making it what a document says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from controlplane.cli.context import COLUMNS, DONE, Context, Document, Output, pass_context, text, watch

PLAN_HAS_CHANGES = 3
NOT_COMPLETE = 4
BUNDLE = Document(dict, "a document with 'format' and 'pools', as 'export' writes it")


@click.command()
@click.argument("noun", type=click.Choice(list(COLUMNS)))
@click.argument("name", required=False)
@click.option("--filter", "-f", "filters", multiple=True, metavar="FIELD=VALUE", help="As the API's: -f pool=chat.")
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@pass_context
def get(context: Context, noun: str, name: str | None, filters: tuple[str, ...], limit: int | None) -> None:
    """Show one object, or a list."""
    if name:
        context.output.row(context.rest.get(f"{noun}/{name}"))
        return
    given = dict(_pair(one) for one in filters)
    context.output.rows(noun, context.rest.every(noun, most=limit, **given))


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), default="-")
@pass_context
def export(context: Context, file: Path) -> None:
    """Write the fleet as a document: YAML, or JSON where FILE ends in .json or --json is given."""
    bundle = context.rest.get("config")
    as_json = context.output.as_json or file.suffix == ".json"
    written = json.dumps(bundle, indent=2, ensure_ascii=False) + "\n" if as_json else _yaml(bundle)
    if str(file) == "-":
        click.echo(written, nl=False)
    else:
        file.write_text(written)


@click.command()
@click.argument("bundle", metavar="FILE", type=BUNDLE)
@click.option("--prune", is_flag=True, help="Also remove what the document's lists do not name.")
@click.option("--draft", is_flag=True, help="Draft policies for somebody to publish, instead of publishing them.")
@click.option("--exit-code", is_flag=True, help="End with 3 where there is anything to do.")
@pass_context
def plan(context: Context, bundle: dict[str, Any], *, prune: bool, draft: bool, exit_code: bool) -> None:
    """Show what applying a document would do. Changes nothing."""
    planned = _planned(context, bundle, _tag(context), prune=prune, draft=draft)
    show_actions(context.output, planned)
    if exit_code and planned["actions"]:
        sys.exit(PLAN_HAS_CHANGES)


@click.command()
@click.argument("bundle", metavar="FILE", type=BUNDLE)
@click.option("--prune", is_flag=True, help="Also remove what the document's lists do not name.")
@click.option("--draft", is_flag=True, help="Draft policies for somebody to publish, instead of publishing them.")
@click.option("--reason", help="For the history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollouts that it starts.")
@pass_context
def apply(
    context: Context, bundle: dict[str, Any], *, prune: bool, draft: bool, reason: str | None, yes: bool, wait: bool
) -> None:
    """Make the fleet what a document says: shows the plan, asks, and applies it unless the fleet has moved on."""
    output, rest, match = context.output, context.rest, _tag(context)
    bundle = {**bundle, **({"reason": reason} if reason else {})}
    planned = _planned(context, bundle, match, prune=prune, draft=draft)
    if not planned["actions"]:
        show_actions(output, planned)
        return
    if not yes:
        show_actions(Output(as_json=False), planned)
        click.confirm("Apply this?", abort=True, err=True)
    applied = rest.send("PUT", "config", bundle, match=match, prune=prune, draft=draft)
    show_actions(output, applied)
    if wait:
        endings = [watch(rest, output, rollout["id"])["state"] for rollout in applied["rollouts"]]
        if any(state != DONE for state in endings):
            sys.exit(NOT_COMPLETE)


def show_actions(output: Output, applied: dict[str, Any]) -> None:
    """What was done, or would be."""
    if output.as_json:
        output.json(applied)
        return
    if not applied["actions"]:
        click.echo("Nothing to do: the fleet is as the document says.")
        return
    lines = [[one["op"], one["kind"], one["name"], _changes(one)] for one in applied["actions"]]
    output.table(["", "kind", "name", "what changes"], lines)


def _changes(action: dict[str, Any]) -> str:
    if action["op"] == "create":
        return "\n".join(f"{one['field']}: {text(one['after'])}" for one in action["changes"])
    return "\n".join(f"{one['field']}: {text(one['before'])} -> {text(one['after'])}" for one in action["changes"])


def _planned(context: Context, bundle: dict[str, Any], match: dict[str, str], **how: bool) -> dict[str, Any]:
    """What applying answers, rehearsed."""
    rehearsal = context.rest.send("PUT", "config", bundle, match=match, **how, dry_run=True)
    planned: dict[str, Any] = rehearsal["result"]
    return planned


def _tag(context: Context) -> dict[str, str]:
    """What makes applying fail if the fleet changed in between."""
    return context.rest.tagged("config")[1]


def _yaml(bundle: dict[str, Any]) -> str:
    return str(yaml.safe_dump(bundle, sort_keys=False, allow_unicode=True))


def _pair(given: str) -> tuple[str, str]:
    name, is_pair, value = given.partition("=")
    if not is_pair:
        raise click.BadParameter(f"{given!r}: expected FIELD=VALUE")
    return name, value


COMMANDS = (get, export, plan, apply)
