"""``python -m routing serve | picker | replica | play | simulate | what-if``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from routing import process

# No lines about each connection, and none of handlers of forks: the process that reads large bodies does not use gRPC.
GRPC_SETTINGS = {"GRPC_VERBOSITY": "ERROR", "GRPC_ENABLE_FORK_SUPPORT": "0"}
COMMANDS = {
    "serve": ("routing.server", "route requests to replicas"),
    "picker": ("routing.picker.service", "choose replicas for an Envoy that carries the bytes"),
    "replica": ("routing.standin.server", "pretend to be a vLLM replica"),
    "play": ("routing.traffic.command", "send traffic through a router and measure what a client sees"),
    "simulate": ("routing.replay.command", "replay a trace over modelled replicas under a policy"),
    "what-if": ("routing.replay.what_if", "replay captured requests, for the control plane"),
}


def main(argv: Sequence[str]) -> int:
    """Run one command. Each is imported only when it runs, so that a router does not need the others' modules."""
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        lines = ["usage: python -m routing COMMAND [--help]", ""]
        lines += [f"  {command:<8} {text}" for command, (_, text) in COMMANDS.items()]
        sys.stderr.write("\n".join(lines) + "\n")
        return 0 if name in {"-h", "--help"} else 2
    if name in {"serve", "picker"}:
        process.block_signals()  # importing the signal handlers' modules takes half a second
    if name == "picker":
        for variable, value in GRPC_SETTINGS.items():
            os.environ.setdefault(variable, value)  # gRPC reads them when it is imported
    try:
        run: Callable[[Sequence[str]], int | None] = import_module(COMMANDS[name][0]).main
    except ImportError as error:
        if name != "picker":
            raise
        extra = "install the packages of the extra: pip install 'warmpath[picker]'"
        sys.stderr.write(f"warmpath picker: {error}; {extra}\n")
        return 2
    return run(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
