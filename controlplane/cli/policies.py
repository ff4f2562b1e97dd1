"""Commands that draft, compare, publish and revert policies, follow and control rollouts, and explain placements."""

from __future__ import annotations

import sys
from typing import Any

import click
import yaml

from controlplane.cli.context import COMPLETE, Context, Document, Pair, format_value, pass_context, watch
from controlplane.cli.fleet import NOT_COMPLETE

STAGES = Document(list, "a list of stages, such as [{share: 0.05, observe_s: 600}]")
REQUEST = Document(dict, "a request, such as {path: /v1/chat/completions, body: {...}}")
Pairs = tuple[tuple[str, str], ...]


@click.command()
@click.argument("policy")
@click.option(
    "--set",
    "-s",
    "pairs",
    type=Pair(),
    multiple=True,
    required=True,
    metavar="SETTING=VALUE",
    help="-s strategy=tiered.",
)
@click.option("--reason", default="", help="The reason to record in the history.")
@pass_context
def draft(context: Context, policy: str, pairs: Pairs, reason: str) -> None:
    """Write a policy's draft: the active settings, with these replaced. Changes no router."""
    current, if_match = context.rest.get_with_tag(f"policies/{policy}")
    live = current["live"]
    settings, active = values_of(pairs), live["settings"] if live else {}
    if settings.get("strategy", active.get("strategy")) == active.get("strategy"):
        settings = {**active, **settings}  # another strategy starts with its own defaults
    body = {"settings": settings, "reason": reason, **({"based_on": live["number"]} if live else {})}
    context.output.row(context.rest.send("PUT", f"policies/{policy}/draft", body, if_match=if_match))


@click.command()
@click.argument("policy")
@pass_context
def diff(context: Context, policy: str) -> None:
    """Show what publishing a policy's draft would change."""
    comparison = context.rest.get(f"policies/{policy}/diff")
    if context.output.as_json:
        context.output.json(comparison)
        return
    lines = [
        [change["field"], format_value(change["before"]), format_value(change["after"]), change["meaning"]]
        for change in comparison["changes"]
    ]
    context.output.table(["setting", "before", "after", "meaning"], lines)
    if finding := comparison.get("finding"):
        context.output.message(f"{finding['detail']} {finding['to_do']}")


@click.command()
@click.argument("policy")
@click.option("--reason", required=True, help="The reason to record in the history.")
@click.option("--plan", help="The rollout plan: all_at_once (the default), by_share, by_router or by_group.")
@click.option("--stages", type=STAGES, metavar="FILE", help="A list of custom stages, in YAML or JSON.")
@click.option(
    "--guard",
    type=Pair(),
    multiple=True,
    metavar="LIMIT=VALUE",
    help="Replace a limit of the canary analysis; null switches it off.",
)
@click.option("--no-guard", is_flag=True, help="Run the stages without canary analysis.")
@click.option("--override-reason", help="Why to publish without the prediction that the pool requires; audited.")
@click.option("--confirm-faulted", is_flag=True, help="Publish settings that an alert or an analysis named.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollout until it ends.")
@pass_context
def publish(
    context: Context,
    policy: str,
    *,
    reason: str,
    plan: str | None,
    stages: Any,
    guard: Pairs,
    no_guard: bool,
    override_reason: str | None,
    confirm_faulted: bool,
    wait: bool,
) -> None:
    """Publish a policy's draft as it is now, and follow its rollout."""
    if guard and no_guard:
        raise click.UsageError("--guard and --no-guard contradict each other.")
    options = {"reason": reason, "plan": plan, "stages": stages, "guard": values_of(guard) or None}
    options |= {"override_reason": override_reason, "confirm_faulted": confirm_faulted or None}
    body = {name: value for name, value in options.items() if value is not None}
    if no_guard:
        body["guard"] = None
    body["digest"] = context.rest.get(f"policies/{policy}/diff")["digest"]
    _, if_match = context.rest.get_with_tag(f"policies/{policy}")
    _follow(context, context.rest.send("POST", f"policies/{policy}/publish", body, if_match=if_match), wait=wait)


@click.command()
@click.argument("policy")
@click.argument("revision", type=click.IntRange(1))
@click.option("--reason", help="The reason to record in the history.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--confirm-faulted", is_flag=True, help="Publish settings that an alert or an analysis named.")
@click.option("--wait/--no-wait", default=True, help="Follow the rollout until it ends.")
@pass_context
def revert(
    context: Context,
    policy: str,
    revision: int,
    *,
    reason: str | None,
    yes: bool,
    confirm_faulted: bool,
    wait: bool,
) -> None:
    """Activate an earlier revision's settings again, as a new revision, on all routers at once."""
    current, if_match = context.rest.get_with_tag(f"policies/{policy}")
    if not yes:
        confirmed_name = click.prompt(
            f"This reverts {policy} to revision {revision}. Type the policy's name to confirm", err=True
        )
        if confirmed_name != policy:
            raise click.ClickException("The name does not match. Nothing was changed.")
    body = {"revision": revision, "reason": reason or ""}
    if current["live"]:
        body["live"] = current["live"]["number"]
    if confirm_faulted:
        body["confirm_faulted"] = True
    _follow(context, context.rest.send("POST", f"policies/{policy}/revert", body, if_match=if_match), wait=wait)


@click.command()
@click.argument("router")
@click.argument("request", metavar="FILE", type=REQUEST)
@pass_context
def explain(context: Context, router: str, request: Any) -> None:
    """Show where ROUTER would place the request in FILE now, and why. It is neither sent to a replica nor stored."""
    context.output.row(context.rest.send("POST", f"routers/{router}/explain", request))


def _follow(context: Context, rollout: dict[str, Any], *, wait: bool, timeout_s: float | None = None) -> None:
    """Print a rollout, with ``wait`` after it ended; then exit with 4 unless it completed."""
    if not wait:
        context.output.rollout(context.rest.get(f"rollouts/{rollout['id']}"))
        return
    ended = watch(context, rollout["id"], timeout_s=timeout_s)
    context.output.rollout(ended)
    if ended["state"] != COMPLETE:
        sys.exit(NOT_COMPLETE)


def values_of(pairs: Pairs) -> dict[str, Any]:
    """NAME=VALUE, with values in YAML."""
    return {name: yaml.safe_load(value) if value else "" for name, value in pairs}


@click.group()
def rollout() -> None:
    """Show, follow, pause, resume, promote, approve and abort rollouts."""


@rollout.command("list")
@click.option("--policy", help="Only rollouts of this policy.")
@click.option("--state", help="Only rollouts in this state.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@pass_context
def list_rollouts(context: Context, policy: str | None, state: str | None, limit: int) -> None:
    """List rollouts, newest first."""
    context.output.rows("rollouts", context.rest.rows("rollouts", limit=limit, policy=policy, state=state))


@rollout.command()
@click.argument("rollout_id", metavar="ID", type=int)
@pass_context
def show(context: Context, rollout_id: int) -> None:
    """Show a rollout: its state, the metrics of its analysis with their limits, and every step."""
    context.output.rollout(context.rest.get(f"rollouts/{rollout_id}"))


@rollout.command("watch")
@click.argument("rollout_id", metavar="ID", type=int)
@click.option(
    "--for", "timeout_s", type=click.FloatRange(0), metavar="SECONDS", help="Stop following after this many seconds."
)
@pass_context
def watch_rollout(context: Context, rollout_id: int, timeout_s: float | None) -> None:
    """Follow a rollout until it ends; exit with 4 unless it completes."""
    _follow(context, {"id": rollout_id}, wait=True, timeout_s=timeout_s)


def _add_transition(name: str, description: str) -> None:
    @rollout.command(name, help=description)
    @click.argument("rollout_id", metavar="ID", type=int)
    @click.option("--reason", required=True, help="The reason to record in the history.")
    @pass_context
    def transition(context: Context, rollout_id: int, reason: str) -> None:
        _, if_match = context.rest.get_with_tag(f"rollouts/{rollout_id}")
        updated = context.rest.send("POST", f"rollouts/{rollout_id}/{name}", {"reason": reason}, if_match=if_match)
        context.output.rollout(updated)


for _name, _description in {
    "pause": "Pause at the current stage.",
    "resume": "Resume a paused rollout.",
    "promote": "Promote to the next stage now, whatever the analysis says.",
    "approve": "Approve the start of a rollout that somebody else published.",
    "abort": "Abort at once: the active revision places all requests again.",
}.items():
    _add_transition(_name, _description)

COMMANDS = (draft, diff, publish, revert, explain, rollout)
