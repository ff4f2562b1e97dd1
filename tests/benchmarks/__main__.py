"""Run benchmarks by name, or all of them: ``python -m tests.benchmarks [NAME ...]``."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "decision": "tests.benchmarks.decision",  # what placing a request costs
    "path": "tests.benchmarks.path",  # what the router's own code costs on a request's way
    "router": "tests.benchmarks.router",  # the router, nginx and direct access side by side
}


def main(chosen: list[str]) -> int:
    """Print the chosen tables; 2 for a name that is none."""
    if unknown := set(chosen) - set(BENCHMARKS):
        print(
            f"no benchmark is named {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr
        )
        return 2
    for name in chosen or BENCHMARKS:
        print(f"\n== {name}\n", flush=True)
        importlib.import_module(BENCHMARKS[name]).main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
