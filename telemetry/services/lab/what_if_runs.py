"""Runs what-ifs: reads the captured traffic, calibrates the engine model, replays the candidates, stores the figures.

Theory of operation. Replays run in a process of their own at a low priority (``python -m routing what-if``), so that
they delay no scrape and no alert rule; the worker only waits for it. At most ``SLOTS`` what-ifs run at once in all
workers together.

Calibration. Engine parameters are fitted to the window's responses. The replay of the active policy is then compared
with what was measured.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.errors import ControlPlaneError
from telemetry.models import WhatIf, WhatIfState
from telemetry.services.lab.what_if_document import measured_outcome, result_document
from telemetry.services.lab.what_if_model import WhatIfError, WindowModel, build_model, candidate_scenario
from telemetry.services.lab.what_ifs import Candidate, read_candidates
from telemetry.storage.locks import WHAT_IF, advisory_lock

log = logging.getLogger(__name__)
SLOTS = 2
STALE = timedelta(minutes=3)  # without a heartbeat: the worker was killed; preparing 200,000 requests has none
MAX_ATTEMPTS = 3
MAX_RUN_S = 600.0
POLL_S = 0.5
REPORT_INTERVAL_S = 1.0  # between two updates of progress and heartbeat
COMMAND = ("-m", "routing", "what-if")  # of Python


class _CancelledError(Exception):
    """The what-if was cancelled while it ran."""


def run_queued() -> int:
    """Run queued what-ifs one after another until there are none; the number that ended. Locked by slot."""
    ended = 0
    for slot in range(SLOTS):
        with advisory_lock(WHAT_IF + slot) as is_locked:
            while is_locked and (what_if := _claim()) is not None:
                run(what_if)
                ended += 1
        if is_locked:
            break
    return ended


def _claim() -> WhatIf | None:
    """The oldest queued what-if, or one whose worker was killed, marked as running."""
    now = timezone.now()
    claimable = Q(state=WhatIfState.QUEUED) | Q(state=WhatIfState.RUNNING, heartbeat_at__lt=now - STALE)
    with transaction.atomic():
        what_if = WhatIf.objects.select_for_update(skip_locked=True).filter(claimable).order_by("pk").first()
        if what_if is None:
            return None
        what_if.state, what_if.heartbeat_at = WhatIfState.RUNNING, now
        what_if.attempts += 1
        what_if.save(update_fields=["state", "heartbeat_at", "attempts"])
    return what_if


def run(what_if: WhatIf) -> None:
    """Run one claimed what-if to its end; every failure is stored with its reason."""
    if what_if.attempts > MAX_ATTEMPTS:
        _end(what_if, WhatIfState.FAILED, reason=f"Its worker was killed {MAX_ATTEMPTS} times.")
        return
    try:
        _end(what_if, WhatIfState.DONE, result=_result(what_if))
    except _CancelledError:
        _end(what_if, WhatIfState.CANCELLED)
    except (WhatIfError, ControlPlaneError) as error:
        _end(what_if, WhatIfState.FAILED, reason=str(error))
    except Exception:
        log.exception("what-if %s failed", what_if.pk)
        _end(what_if, WhatIfState.FAILED, reason="An internal error; the worker's log has it.")


def _end(what_if: WhatIf, state: WhatIfState, *, result: Mapping[str, Any] | None = None, reason: str = "") -> None:
    WhatIf.objects.filter(pk=what_if.pk, state=WhatIfState.RUNNING).update(
        state=state, result=result, reason=reason[:500], ended_at=timezone.now(), progress_ratio=1.0
    )


def _result(what_if: WhatIf) -> dict[str, Any]:
    """The result document."""
    candidates = read_candidates(what_if.candidates)
    model = build_model(what_if)
    active = Candidate("active policy")  # of that time
    scenarios = [candidate_scenario(model, candidate) for candidate in (active, *candidates)]
    with _progress(what_if) as report:
        replayed = _replay(model, scenarios, report)
    return result_document(what_if, model, measured_outcome(model), scenarios, replayed)


def _replay(
    model: WindowModel, scenarios: Sequence[dict[str, Any]], report: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Replay scenarios in a process of their own; the results by scenario, as in ``routing.replay.job``."""
    requests, columns = model.traffic.requests, model.columns
    job = {
        "block_tokens": columns.block_tokens,
        "groups": requests.groups.names,
        "at_s": (requests.at_s - requests.at_s[0]).tobytes(),
        "prompt_tokens": columns.prompt_tokens.tobytes(),
        "output_tokens": columns.output_tokens.tobytes(),
        "starts": columns.starts.tobytes(),
        "ids": columns.ids.tobytes(),
        "tier1": model.traffic.prefixes.tobytes(),
        "session": model.traffic.sessions.tobytes(),
        "group": requests.groups.codes.tobytes(),
        "router": model.traffic.routers.codes.tobytes(),
        "scenarios": scenarios,
    }
    with tempfile.TemporaryDirectory(prefix="warmpath-what-if-") as folder:
        job_path, result_path = Path(folder, "job"), Path(folder, "result")
        job_path.write_bytes(msgspec.msgpack.encode(job))
        run_process([sys.executable, *COMMAND, str(job_path), str(result_path)], report)
        results: list[dict[str, Any]] = msgspec.msgpack.decode(result_path.read_bytes())
    return results


def run_process(command: Sequence[str], report: Callable[[float], None]) -> None:
    """Run the replay process to its end; WhatIfError if it fails or takes too long."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    ends_at = timezone.now() + timedelta(seconds=MAX_RUN_S)
    with (
        tempfile.TemporaryFile() as errors,  # an unread pipe would block the process once it is full
        subprocess.Popen(  # noqa: S603 - our own module, without a shell
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        try:
            _follow(process, ends_at, report)
        except BaseException:
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip()[-300:]
            raise WhatIfError(f"The replay ended with status {process.returncode}: {last}")


def _follow(process: subprocess.Popen[bytes], ends_at: datetime, report: Callable[[float], None]) -> None:
    """Report progress until the process closes its standard output."""
    if process.stdout is None:
        raise AssertionError("it is a pipe")
    ratio, rest = 0.0, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(POLL_S):
                data = os.read(process.stdout.fileno(), 65_536)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    progress = json.loads(line)
                    ratio = progress["done"] / max(1, progress["of"])
            report(ratio)
            if timezone.now() > ends_at:
                raise WhatIfError(f"The replay took longer than {MAX_RUN_S:.0f} s: choose a shorter window.")


@contextmanager
def _progress(what_if: WhatIf) -> Iterator[Callable[[float], None]]:
    """A callback that stores progress and heartbeat at most once a second, and raises if the what-if is cancelled."""
    written = timezone.now()

    def report(ratio: float) -> None:
        nonlocal written
        now = timezone.now()
        if now - written < timedelta(seconds=REPORT_INTERVAL_S):
            return
        written = now
        updated = WhatIf.objects.filter(pk=what_if.pk, state=WhatIfState.RUNNING, is_cancelled=False)
        if not updated.update(progress_ratio=ratio, heartbeat_at=now):
            raise _CancelledError

    yield report
