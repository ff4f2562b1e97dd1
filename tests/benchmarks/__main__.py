"""Run benchmarks by name, or all of them: ``python -m tests.benchmarks [NAME ...]``.

A benchmark named alone accepts its own options: ``python -m tests.benchmarks quality --trace FILE``. Benchmarks of
the router also measure the compiled build where a C compiler is available.
"""

from __future__ import annotations

import importlib
import signal
import sys

from routing.admin.api import is_compiled
from tests.benchmarks.builds import again_compiled

BENCHMARKS = {
    "alerts": "tests.benchmarks.alerts",  # alerting as a classifier: drops found, causes right, false alarms
    "agreement": "tests.benchmarks.agreement",  # whether routers send a new prompt to the same home
    "bodies": "tests.benchmarks.bodies",  # what other connections wait while a large body is handled
    "causes": "tests.benchmarks.causes",  # whether the cause of a drop is named first
    "convergence": "tests.benchmarks.convergence",  # how soon routers run what was published
    "decision": "tests.benchmarks.decision",  # what placing a request costs
    "files": "tests.benchmarks.files",  # source files that a request, a push and a scrape pass through
    "ladder": "tests.benchmarks.ladder",  # what replaying five minutes of decisions takes
    "path": "tests.benchmarks.path",  # what the router's own code costs on a request's way
    "predictions": "tests.benchmarks.predictions",  # predicted against delivered tokens; needs replicas of yours
    "quality": "tests.benchmarks.quality",  # how good each strategy's choices are, and how fast they are replayed
    "soak": "tests.benchmarks.soak",  # goals that need time or numbers, judged; not among "all"
    "router": "tests.benchmarks.router",  # the router, nginx and direct access side by side
    "telemetry": "tests.benchmarks.telemetry",  # scraping a thousand replicas on one core, and charts of many
}
# What runs the router's code in this process runs it compiled too, in another process; the options of that run.
COMPILED_TOO = {"decision": (), "path": (), "quality": ("--speed",)}
TAKE_OPTIONS = {"alerts", "causes", "predictions", "quality", "soak", "telemetry"}
ON_DEMAND = {"predictions", "soak"}


def main(arguments: list[str]) -> int:
    """Print the chosen tables; exit status 2 for an unknown name or unexpected options."""
    start = next((place for place, text in enumerate(arguments) if text.startswith("--")), len(arguments))
    chosen, options = arguments[:start], arguments[start:]
    if unknown := set(chosen) - set(BENCHMARKS):
        print(
            f"no benchmark is named {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr
        )
        return 2
    if options and not (len(chosen) == 1 and chosen[0] in TAKE_OPTIONS):
        print(f"options are for one benchmark of its own: {', '.join(sorted(TAKE_OPTIONS))}", file=sys.stderr)
        return 2
    for name in chosen or [name for name in BENCHMARKS if name not in ON_DEMAND]:
        print(f"\n== {name}{', compiled' if is_compiled() else ''}\n", flush=True)
        run = importlib.import_module(BENCHMARKS[name]).main
        run(options) if options else run()
        if name in COMPILED_TOO:
            again_compiled(name, COMPILED_TOO[name])
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started ends too
    sys.exit(main(sys.argv[1:]))
