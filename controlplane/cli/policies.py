"""Drafting, comparing, publishing, going back, and asking why.

Rollouts: following them, and stepping in.
"""

from __future__ import annotations

import sys
from typing import Any

import click
import yaml

from controlplane.cli.context import DONE, Context, Document, pass_context, present, text, watch
from controlplane.cli.fleet import NOT_COMPLETE

STAGES = Document(list, "a list of stages, such as [{share: 0.05, observe_s: 600}]")
REQUEST = Document(dict, "a request, such as {path: /v1/chat/completions, body: {...}}")


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
@click.option("--plan", help="How: all_at_once (the default), by_share, by_router or by_group.")
@click.option("--stages", type=STAGES, metavar="FILE", help="A list of stages of your own, in YAML or JSON.")
@click.option("--guard", multiple=True, metavar="LIMIT=VALUE", help="Another limit than the default; null: none.")
@click.option("--no-guard", is_flag=True, help="Let nothing judge the stages.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollout.")
@pass_context
def publish(
    context: Context,
    policy: str,
    *,
    reason: str,
    plan: str | None,
    stages: Any,
    guard: tuple[str, ...],
    no_guard: bool,
    wait: bool,
) -> None:
    """Publish a policy's draft as it is now, and follow its rollout."""
    if guard and no_guard:
        raise click.UsageError("--guard and --no-guard say opposite things.")
    asked = {"plan": plan, "stages": stages, "guard": _pairs(guard) or None}
    body = {"reason": reason, **{name: value for name, value in asked.items() if value is not None}}
    if no_guard:
        body["guard"] = None
    body["digest"] = context.rest.get(f"policies/{policy}/diff")["digest"]
    _, match = context.rest.tagged(f"policies/{policy}")
    _follow(context, context.rest.send("POST", f"policies/{policy}/publish", body, match=match), wait=wait)


@click.command()
@click.argument("policy")
@click.argument("revision", type=click.IntRange(1))
@click.option("--reason", help="For the history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollout.")
@pass_context
def revert(context: Context, policy: str, revision: int, *, reason: str | None, yes: bool, wait: bool) -> None:
    """Put an earlier revision's settings into force again, as a new revision, at all routers at once."""
    now, match = context.rest.tagged(f"policies/{policy}")
    if not yes:
        typed = click.prompt(f"This takes {policy} back to revision {revision}. Type the policy's name", err=True)
        if typed != policy:
            raise click.ClickException("That is not its name. Nothing was changed.")
    body = {"revision": revision, "reason": reason or "", **({"live": now["live"]["number"]} if now["live"] else {})}
    _follow(context, context.rest.send("POST", f"policies/{policy}/revert", body, match=match), wait=wait)


@click.command()
@click.argument("router")
@click.argument("asked", metavar="FILE", type=REQUEST)
@pass_context
def explain(context: Context, router: str, asked: Any) -> None:
    """Where ROUTER would place the request in FILE now, and why. Nothing is sent to a replica, nothing is kept."""
    context.output.row(context.rest.send("POST", f"routers/{router}/explain", asked))


def _follow(context: Context, rollout: dict[str, Any], *, wait: bool) -> None:
    ended = (
        watch(context.rest, context.output, rollout["id"]) if wait else context.rest.get(f"rollouts/{rollout['id']}")
    )
    present(context.output, ended)
    if wait and ended["state"] != DONE:
        sys.exit(NOT_COMPLETE)


def _settings(given: tuple[str, ...], live: dict[str, Any]) -> dict[str, Any]:
    """The settings in force with some replaced; another strategy begins with its own defaults."""
    said = _pairs(given)
    strategy = said.get("strategy", live.get("strategy"))
    return {**(live if strategy == live.get("strategy") else {}), **said}


def _pairs(given: tuple[str, ...]) -> dict[str, Any]:
    """NAME=VALUE, the value as YAML writes it."""
    said: dict[str, Any] = {}
    for one in given:
        name, is_pair, value = one.partition("=")
        if not is_pair:
            raise click.BadParameter(f"{one!r}: expected NAME=VALUE")
        said[name] = yaml.safe_load(value) if value else ""
    return said


COMMANDS = (draft, diff, publish, revert, explain)


@click.group()
def rollout() -> None:
    """See, follow, pause, resume, promote, approve and abort rollouts."""


@rollout.command("list")
@click.option("--policy", help="Of this policy alone.")
@click.option("--state", help="In this state alone.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@pass_context
def list_(context: Context, policy: str | None, state: str | None, limit: int) -> None:
    """Show rollouts, the newest first."""
    context.output.rows("rollouts", context.rest.every("rollouts", most=limit, policy=policy, state=state))


@rollout.command()
@click.argument("rollout_id", metavar="ID", type=int)
@pass_context
def show(context: Context, rollout_id: int) -> None:
    """Show one: where it stands, what its guard read beside the limits, and every step."""
    present(context.output, context.rest.get(f"rollouts/{rollout_id}"))


@rollout.command("watch")
@click.argument("rollout_id", metavar="ID", type=int)
@click.option("--for", "deadline_s", type=click.FloatRange(0), metavar="SECONDS", help="At most so long.")
@pass_context
def follow(context: Context, rollout_id: int, deadline_s: float | None) -> None:
    """Follow one until it is over; 4 unless it ended complete."""
    ended = watch(context.rest, context.output, rollout_id, deadline_s=deadline_s)
    present(context.output, ended)
    if ended["state"] != DONE:
        sys.exit(NOT_COMPLETE)


def _stepping_in(name: str, what: str) -> click.Command:
    @rollout.command(name, help=what)
    @click.argument("rollout_id", metavar="ID", type=int)
    @click.option("--reason", required=True, help="For the history.")
    @pass_context
    def step_in(context: Context, rollout_id: int, reason: str) -> None:
        _, match = context.rest.tagged(f"rollouts/{rollout_id}")
        moved = context.rest.send("POST", f"rollouts/{rollout_id}/{name}", {"reason": reason}, match=match)
        present(context.output, moved)

    return step_in


for _name, _what in {
    "pause": "Go no further; what is on trial stays on trial.",
    "resume": "Go on.",
    "promote": "Go to the next stage now, whatever the guard says.",
    "approve": "Let a rollout begin that somebody else published.",
    "abort": "Take the revision back at once: the former one places all requests again.",
}.items():
    _stepping_in(_name, _what)
