"""``warmpath what-if``: predictions of other policies on a pool's captured traffic."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from controlplane.cli.context import Context, Document, Pair, pass_context
from controlplane.cli.policies import Pairs, values_of

CANDIDATES = Document(list, "a list of candidates, such as [{name: a, settings: {strategy: tiered}, replicas: 6}]")
POLL_S = 1.0
FAILED = 1


@click.command("what-if")
@click.argument("pool")
@click.option("--set", "-s", "pairs", type=Pair(), multiple=True, metavar="SETTING=VALUE", help="-s strategy=tiered.")
@click.option("--replicas", type=click.IntRange(1), help="With this number of replicas.")
@click.option("--cache-tokens", type=click.IntRange(1), help="With caches of this size, in tokens.")
@click.option("--draft", is_flag=True, help="The draft of the policy that POOL names: a pool, or pool.group.")
@click.option("--candidates", type=CANDIDATES, metavar="FILE", help="Several candidates, in YAML or JSON.")
@click.option("--sweep", is_flag=True, help="With fewer and more replicas, and smaller and larger caches.")
@click.option("--from", "start", metavar="TIME", help="Start of the captured traffic; by default 30 minutes ago.")
@click.option("--to", "end", metavar="TIME", help="Its end; by default now.")
@click.option("--wait/--no-wait", default=True, help="Wait for the result.")
@pass_context
def what_if(
    context: Context,
    pool: str,
    *,
    pairs: Pairs,
    replicas: int | None,
    cache_tokens: int | None,
    draft: bool,
    candidates: list[Any] | None,
    sweep: bool,
    start: str | None,
    end: str | None,
    wait: bool,
) -> None:
    """Predict what other settings would bring on a pool's own traffic. Changes no router.

    Exit status 1 if the prediction fails or is not calibrated.
    """
    if draft:
        pool, candidates = _draft(context, pool)
    if candidates is None and not sweep:
        own = {"settings": values_of(pairs) or None, "replicas": replicas, "cache_tokens": cache_tokens}
        changes = {name: value for name, value in own.items() if value is not None}
        if not changes:
            raise click.UsageError(
                "Name what to change: -s, --replicas, --cache-tokens, --draft, --candidates or --sweep."
            )
        candidates = [{"name": _name(changes), **changes}]
    asked = {"sweep": "capacity" if sweep else None, "candidates": candidates}
    body = {"pool": pool, **asked, "start": start, "end": end}
    created = context.rest.send("POST", "what-ifs", {name: value for name, value in body.items() if value is not None})
    if not wait:
        context.output.row({name: created[name] for name in ("id", "pool", "state", "start", "end")})
        return
    ended = _wait(context, created)
    _print(context, ended)
    if ended["state"] != "done" or not ended["result"]["calibration"]["is_calibrated"]:
        sys.exit(FAILED)


def _draft(context: Context, policy: str) -> tuple[str, list[Any]]:
    """The pool of a policy, and its draft as a candidate."""
    current = context.rest.get(f"policies/{policy}")
    draft, group = current["draft"], current["group"]
    if draft is None:
        raise click.ClickException(f"Policy {policy} has no draft.")
    change = {"settings": draft["settings"]} if group is None else {"groups": {group: draft["settings"]}}
    return current["pool"], [{"name": f"draft, revision {draft['number']}", **change}]


def _name(changes: dict[str, Any]) -> str:
    settings = changes.get("settings") or {}
    parts = [str(settings.get("strategy", "active policy"))]
    parts += [f"{name}={value}" for name, value in settings.items() if name != "strategy"]
    parts += [f"{name} {changes[name]}" for name in ("replicas", "cache_tokens") if name in changes]
    return ", ".join(parts)[:100]


def _wait(context: Context, created: dict[str, Any]) -> dict[str, Any]:
    """The what-if once it has ended; a worker bounds how long it runs."""
    current = created
    while current["state"] in {"queued", "running"}:
        time.sleep(POLL_S)
        current = context.rest.get(f"what-ifs/{created['id']}")
    return current


def _print(context: Context, what_if: dict[str, Any]) -> None:
    if context.output.as_json:
        context.output.json(what_if)
        return
    if what_if["state"] != "done":
        context.output.message(f"State of the what-if: {what_if['state']}. {what_if['reason']}".strip())
        return
    result = what_if["result"]
    context.output.table(
        ["candidate", "hit rate %", "TTFT p50 s", "p95", "p99", "prefill GPU-s", "max/mean load", "verdict"],
        [_line("measured", result["measured"], "")]
        + [
            _line(row["name"], row["figures"], row["verdict"] if number else "")
            for number, row in enumerate(result["candidates"])
        ],
    )
    for summary in (row["summary"] or row["reason"] for row in result["candidates"]):
        if summary:
            context.output.message(summary)
    for problem in result["calibration"]["problems"]:
        context.output.message(f"Not calibrated: {problem}")
    for note in result["notes"]:
        context.output.message(note)


def _line(name: str, figures: dict[str, Any] | None, verdict: str) -> list[str]:
    if figures is None:
        return [name, "-", "-", "-", "-", "-", "-", verdict]
    hit = figures["hit_rate"]
    seconds = (figures[f"ttft_{name}_s"] for name in ("p50", "p95", "p99"))
    return [
        name,
        "-" if hit is None else f"{100 * hit:.1f}",
        *("-" if value is None else f"{value:.3f}" for value in seconds),
        "-" if figures["prefill_gpu_s"] is None else f"{figures['prefill_gpu_s']:.1f}",
        "-" if figures["load_max_over_mean"] is None else f"{figures['load_max_over_mean']:.2f}",
        verdict,
    ]


COMMANDS = (what_if,)
