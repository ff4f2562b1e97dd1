"""``python -m routing picker``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from routing.server import run
from routing.settings import read_picker_settings

# No lines about each connection, and none of handlers of forks: the process that reads large bodies does not use gRPC.
GRPC_SETTINGS = {"GRPC_VERBOSITY": "ERROR", "GRPC_ENABLE_FORK_SUPPORT": "0"}


def main(argv: Sequence[str]) -> int:
    """Run an endpoint picker; exit status as of ``serve``."""
    for name, value in GRPC_SETTINGS.items():
        os.environ.setdefault(name, value)  # gRPC reads them when it is imported
    try:
        from routing.picker.service import Picker  # noqa: PLC0415 - its packages may be missing
    except ImportError as error:
        sys.stderr.write(
            f"warmpath picker: {error}; install the packages of the extra: pip install 'warmpath[picker]'\n"
        )
        return 2
    return run(argv, read_picker_settings, Picker)
