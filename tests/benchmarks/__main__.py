"""Run benchmarks by name, or all of them: ``python -m tests.benchmarks [NAME ...]``.

A benchmark named alone accepts its own options: ``python -m tests.benchmarks quality --trace FILE``. Benchmarks of
the router also measure the compiled build where a C compiler is available.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable

import django

from routing.admin.api import is_compiled
from tests.benchmarks.builds import run_compiled

BENCHMARKS = {
    "alerts": "tests.benchmarks.alerts",  # alerting as a classifier: detected drops, correct causes, false alarms
    "ablate": "tests.benchmarks.ablate",  # what each part of lowest_cost saves
    "bodies": "tests.benchmarks.bodies",  # how long other connections wait while a large body is handled
    "causes": "tests.benchmarks.causes",  # whether the right cause of a drop ranks first
    "decision": "tests.benchmarks.decision",  # cost of placing a request
    "files": "tests.benchmarks.files",  # source files that a request, a push and a scrape pass through
    "guard": "tests.benchmarks.guard",  # harmless canaries that are rolled back, harmful ones that are found
    "kv_events": "tests.benchmarks.kv_events",  # CPU of a router with KV events and without
    "literature": "tests.benchmarks.literature",  # the tables of docs/literature.md
    "objectives": "tests.benchmarks.objectives",  # objectives for TTFT kept, with the feature and without it
    "path": "tests.benchmarks.path",  # cost of the router's own code per request
    "peers": "tests.benchmarks.comparison",  # live, against the routers that users would pick instead; an hour
    "picker": "tests.benchmarks.picker",  # Envoy with a picker beside the router; needs envoy
    "predictions": "tests.benchmarks.predictions",  # predicted and delivered cached tokens; needs running vLLM replicas
    "quality": "tests.benchmarks.quality",  # quality of each strategy's choices, and speed of replays
    "response_cache": "tests.benchmarks.response_cache",  # what a response cache and a store that fails cost
    "sharing": "tests.benchmarks.sharing",  # live routers that share their state, beside the simulator
    "size": "tests.benchmarks.size",  # lines of code by part, beside their budget; part of make check
    "strategies": "tests.benchmarks.strategies",  # every strategy against least_load at several loads, with limits
    "soak": "tests.benchmarks.soak",  # goals that need long runs or large numbers; not run by default
    "router": "tests.benchmarks.router",  # the router, nginx and direct access side by side
    "telemetry": "tests.benchmarks.telemetry",  # scraping a thousand replicas on one core
    "what_if": "tests.benchmarks.what_if",  # predictions against what became, and rule evaluation meanwhile; 15 minutes
}
# Benchmarks that run the router's code in this process run again, compiled, in another process, with these options.
RUN_COMPILED = {"decision": (), "path": (), "quality": ("--speed",), "response_cache": ()}
ON_DEMAND = {
    "ablate",
    "kv_events",
    "literature",
    "objectives",
    "peers",
    "picker",
    "predictions",
    "response_cache",
    "sharing",
    "size",
    "soak",
    "strategies",
    "what_if",
}
WITH_OPTIONS = (ON_DEMAND - {"size"}) | {"alerts", "causes", "guard", "quality", "telemetry"}


def main(arguments: list[str]) -> int:
    """Print the chosen tables; exit status 2 for an unknown name or unexpected options."""
    start = next((index for index, text in enumerate(arguments) if text.startswith("--")), len(arguments))
    chosen, options = arguments[:start], arguments[start:]
    if unknown := set(chosen) - set(BENCHMARKS):
        print(
            f"no benchmark is named {', '.join(sorted(unknown))}; choose from {', '.join(BENCHMARKS)}", file=sys.stderr
        )
        return 2
    if options and not (len(chosen) == 1 and chosen[0] in WITH_OPTIONS):
        print(f"options need exactly one benchmark, one of {', '.join(sorted(WITH_OPTIONS))}", file=sys.stderr)
        return 2
    for name in chosen or [name for name in BENCHMARKS if name not in ON_DEMAND]:
        print(f"\n== {name}{', compiled' if is_compiled() else ''}\n", flush=True)
        run = load(name)
        run(options) if options else run()
        if name in RUN_COMPILED:
            run_compiled(name, RUN_COMPILED[name])
    return 0


def load(name: str) -> Callable[..., object]:
    """The benchmark with this name, as a function of its options. Some import models."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.test")
    django.setup()
    return importlib.import_module(BENCHMARKS[name]).main


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for Ctrl-C, so that child processes end too
    sys.exit(main(sys.argv[1:]))
