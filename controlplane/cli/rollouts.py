"""Rollouts: following them, and stepping in."""

from __future__ import annotations

import sys

import click

from .context import Context, pass_context
from .fleet import NOT_COMPLETE
from .watching import DONE, present, watch


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
