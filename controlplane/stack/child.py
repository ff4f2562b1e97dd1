"""One process of the local stack: how it is started, how one knows that it is ready, how it is stopped."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a process runs as."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Child:
    """A process to supervise. ``ready`` raises nothing and answers quickly; it is asked until it says True."""

    name: str
    command: Sequence[str]
    ready: Callable[[], bool] = lambda: True
    environment: Mapping[str, str] = field(default_factory=dict)  # added to ours
    account: Account | None = None  # None: our own
    stop_signal: signal.Signals = signal.SIGTERM
    restart: bool = True  # started anew when it ends by itself
    restart_pause_s: float | None = None  # before that; None: short, and growing while it keeps ending

    def popen_options(self) -> dict[str, object]:
        """Options for ``subprocess``: an own session, no input, and TERM when the parent dies."""
        options: dict[str, object] = {
            "env": {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
            "start_new_session": True,
        }
        if self.account:
            options |= {"user": self.account.uid, "group": self.account.gid, "extra_groups": []}
        if sys.platform == "linux":
            options["preexec_fn"] = self._end_with_parent
        return options

    def _end_with_parent(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(self.stop_signal))
