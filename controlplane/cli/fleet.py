"""Commands that show the fleet, and export, plan and apply it as a document."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from controlplane.cli.context import (
    COLUMNS,
    COMPLETE,
    Context,
    Document,
    Output,
    Pair,
    format_value,
    pass_context,
    watch,
)

PLAN_HAS_CHANGES = 3
NOT_COMPLETE = 4
BUNDLE = Document(dict, "a document with 'format' and 'pools', as 'export' writes it")


@click.command()
@click.argument("resource", type=click.Choice(list(COLUMNS)))
@click.argument("name", required=False)
@click.option(
    "--filter",
    "-f",
    "filters",
    type=Pair(),
    multiple=True,
    metavar="FIELD=VALUE",
    help="A filter of the REST API: -f pool=chat.",
)
@click.option("--limit", type=click.IntRange(1), help="Maximum number of objects.")
@pass_context
def get(
    context: Context, resource: str, name: str | None, filters: tuple[tuple[str, str], ...], limit: int | None
) -> None:
    """Show one object, or a list."""
    if name:
        context.output.row(context.rest.get(f"{resource}/{name}"))
    else:
        context.output.rows(resource, context.rest.rows(resource, limit=limit, **dict(filters)))


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), default="-")
@pass_context
def export(context: Context, file: Path) -> None:
    """Write the fleet as a document: YAML, or JSON where FILE ends in .json or --json is given."""
    bundle = context.rest.get("config")
    if context.output.as_json or file.suffix == ".json":
        document = json.dumps(bundle, indent=2, ensure_ascii=False) + "\n"
    else:
        document = str(yaml.safe_dump(bundle, sort_keys=False, allow_unicode=True))
    if str(file) == "-":
        click.echo(document, nl=False)
    else:
        file.write_text(document)


def _bundle_options(command: Any) -> Any:
    for decorate in (
        click.option("--draft", is_flag=True, help="Draft policies instead of publishing them."),
        click.option("--prune", is_flag=True, help="Also remove what the document's lists do not name."),
        click.argument("bundle", metavar="FILE", type=BUNDLE),
    ):
        command = decorate(command)
    return command


@click.command()
@_bundle_options
@click.option("--exit-code", is_flag=True, help="Exit with status 3 if there are changes.")
@pass_context
def plan(context: Context, bundle: dict[str, Any], *, prune: bool, draft: bool, exit_code: bool) -> None:
    """Show what applying a document would do. Changes nothing."""
    _, if_match = context.rest.get_with_tag("config")
    planned = _dry_run(context, bundle, if_match, prune=prune, draft=draft)
    _show_actions(context.output, planned)
    if exit_code and planned["actions"]:
        sys.exit(PLAN_HAS_CHANGES)


@click.command()
@_bundle_options
@click.option("--reason", help="The reason to record in the history.")
@click.option("--override-reason", help="Why to publish without the prediction that a pool requires; audited.")
@click.option("--confirm-faulted", is_flag=True, help="Publish settings that an alert or an analysis named.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollouts until they end.")
@pass_context
def apply(
    context: Context,
    bundle: dict[str, Any],
    *,
    prune: bool,
    draft: bool,
    reason: str | None,
    override_reason: str | None,
    confirm_faulted: bool,
    yes: bool,
    wait: bool,
) -> None:
    """Change the fleet to match a document: show the plan, ask, and apply it unless the fleet changed meanwhile."""
    _, if_match = context.rest.get_with_tag("config")
    options = {"reason": reason, "override_reason": override_reason, "confirm_faulted": confirm_faulted}
    bundle = {**bundle, **{name: value for name, value in options.items() if value}}
    planned = _dry_run(context, bundle, if_match, prune=prune, draft=draft)
    if not planned["actions"]:
        _show_actions(context.output, planned)
        return
    if not yes:
        _show_actions(Output(as_json=False), planned)
        click.confirm("Apply this?", abort=True, err=True)
    applied = context.rest.send("PUT", "config", bundle, if_match=if_match, prune=prune, draft=draft)
    _show_actions(context.output, applied)
    if wait:
        states = [watch(context, rollout["id"])["state"] for rollout in applied["rollouts"]]
        if any(state != COMPLETE for state in states):
            sys.exit(NOT_COMPLETE)


def _dry_run(context: Context, bundle: dict[str, Any], if_match: dict[str, str], **options: bool) -> dict[str, Any]:
    """The result of a dry run."""
    response = context.rest.send("PUT", "config", bundle, if_match=if_match, **options, dry_run=True)
    planned: dict[str, Any] = response["result"]
    return planned


def _show_actions(output: Output, applied: dict[str, Any]) -> None:
    if output.as_json:
        output.json(applied)
    elif not applied["actions"]:
        click.echo("Nothing to do: the fleet matches the document.")
    else:
        lines = [[action["op"], action["kind"], action["name"], _changes(action)] for action in applied["actions"]]
        output.table(["", "kind", "name", "changes"], lines)


def _changes(action: dict[str, Any]) -> str:
    lines = []
    for change in action["changes"]:
        before = "" if action["op"] == "create" else f"{format_value(change['before'])} -> "
        lines.append(f"{change['field']}: {before}{format_value(change['after'])}")
    return "\n".join(lines)


@click.command()
@click.argument("group", metavar="POOL.GROUP")
@click.option("--model", help="Only responses of this model.")
@click.option("--namespace", help='Only responses of this namespace; "" is that of requests that name none.')
@click.option("--key", help="Only the response that clients got with this X-Warmpath-Cache-Key.")
@click.option("--dry-run", is_flag=True, help="Count the stored responses, and remove none.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@pass_context
def purge(context: Context, /, group: str, *, dry_run: bool, yes: bool, **scope: str | None) -> None:
    """Remove a task group's stored responses from the response caches of all routers."""
    pool, dot, name = group.partition(".")
    rows = context.rest.rows("task-groups", pool=pool, name=name) if dot else []
    if not rows:
        raise click.ClickException(f"There is no task group {group!r}; name it as POOL.GROUP.")
    if not (dry_run or yes):
        click.confirm(f"Remove the stored responses of {group}?", abort=True, err=True)
    body = {name: text for name, text in scope.items() if text is not None}
    path = f"task-groups/{rows[0]['id']}/purge-response-cache"
    answer = context.rest.send("POST", path, body, dry_run=dry_run)
    result = answer["result"] if dry_run else answer
    if "routers" not in result:
        raise click.ClickException(result["detail"])
    if context.output.as_json:
        context.output.json(result)
    else:
        context.output.rows("purges", result["routers"])
    if "detail" in result:
        raise click.ClickException(result["detail"])


COMMANDS = (get, export, plan, apply, purge)
