"""Drafting, comparing, publishing, going back, and asking why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from .context import Context, pass_context
from .fleet import NOT_COMPLETE
from .output import text
from .watching import DONE, watch


@click.command()
@click.argument("policy")
@click.option("--set", "-s", "given", multiple=True, required=True, metavar="SETTING=VALUE", help="-s strategy=tiered.")
@click.option("--reason", default="", help="For the history.")
@pass_context
def draft(context: Context, policy: str, given: tuple[str, ...], reason: str) -> None:
    """Write a policy's draft: the settings in force, with these in their place. Nothing reaches a router."""
    now, match = context.rest.tagged(f"policies/{policy}")
    live = now["live"]
    settings = _settings(given, live["settings"] if live else {})
    body = {"settings": settings, "reason": reason, **({"based_on": live["number"]} if live else {})}
    context.output.row(context.rest.send("PUT", f"policies/{policy}/draft", body, match=match))


@click.command()
@click.argument("policy")
@pass_context
def diff(context: Context, policy: str) -> None:
    """What publishing a policy's draft would change."""
    found = context.rest.get(f"policies/{policy}/diff")
    if context.output.as_json:
        context.output.json(found)
        return
    lines = [[one["field"], text(one["before"]), text(one["after"]), one["meaning"]] for one in found["changes"]]
    context.output.table(["setting", "before", "after", "meaning"], lines)


@click.command()
@click.argument("policy")
@click.option("--reason", required=True, help="For the history.")
@click.option("--plan", help="How: all_at_once, or one of the site's staged plans.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollout.")
@pass_context
def publish(context: Context, policy: str, reason: str, plan: str | None, *, wait: bool) -> None:
    """Publish a policy's draft as it is now, and follow its rollout."""
    digest = context.rest.get(f"policies/{policy}/diff")["digest"]
    _, match = context.rest.tagged(f"policies/{policy}")
    body = {"reason": reason, "digest": digest, **({"plan": plan} if plan else {})}
    _follow(context, context.rest.send("POST", f"policies/{policy}/publish", body, match=match), wait=wait)


@click.command()
@click.argument("policy")
@click.argument("revision", type=click.IntRange(1))
@click.option("--reason", help="For the history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollout.")
@pass_context
def revert(context: Context, policy: str, revision: int, reason: str | None, *, yes: bool, wait: bool) -> None:
    """Put an earlier revision's settings into force again, as a new revision, at all routers at once."""
    rest = context.rest
    found = rest.every("revisions", policy=policy)
    earlier = next((one for one in found if one["number"] == revision), None)
    if earlier is None:
        raise click.ClickException(f"Policy {policy} has no revision {revision}.")
    if not yes:
        typed = click.prompt(f"This takes {policy} back to revision {revision}. Type the policy's name", err=True)
        if typed != policy:
            raise click.ClickException("That is not its name. Nothing was changed.")
    why = reason or f"Back to revision {revision}"
    now, match = rest.tagged(f"policies/{policy}")
    body = {"settings": earlier["settings"], "reason": why, "based_on": now["live"]["number"]}
    digest = rest.send("PUT", f"policies/{policy}/draft", body, match=match)["digest"]
    _, match = rest.tagged(f"policies/{policy}")
    published = {"reason": why, "digest": digest}
    _follow(context, rest.send("POST", f"policies/{policy}/publish", published, match=match), wait=wait)


@click.command()
@click.argument("router")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@pass_context
def explain(context: Context, router: str, file: Path) -> None:
    """Where ROUTER would place the request in FILE now, and why. Nothing is sent to a replica, nothing is kept."""
    try:
        asked = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text())
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{file}: {error}") from None
    context.output.row(context.rest.send("POST", f"routers/{router}/explain", asked))


def _follow(context: Context, rollout: dict[str, Any], *, wait: bool) -> None:
    ended = watch(context.rest, context.output, rollout["id"]) if wait else rollout
    context.output.row(ended)
    if wait and ended["state"] != DONE:
        sys.exit(NOT_COMPLETE)


def _settings(given: tuple[str, ...], live: dict[str, Any]) -> dict[str, Any]:
    """The settings in force with some replaced; another strategy begins with its own defaults."""
    said: dict[str, Any] = {}
    for one in given:
        name, is_pair, value = one.partition("=")
        if not is_pair:
            raise click.BadParameter(f"{one!r}: expected SETTING=VALUE")
        said[name] = yaml.safe_load(value) if value else ""
    strategy = said.get("strategy", live.get("strategy"))
    return {**(live if strategy == live.get("strategy") else {}), **said}


COMMANDS = (draft, diff, publish, revert, explain)
