"""One line per event on stderr: time, level, event, then ``name=value`` pairs. Never a prompt, a key or a cookie."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from pathlib import Path

_bare = re.compile(r"[A-Za-z0-9._:/+@-]+").fullmatch


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z WARNING replica_down replica=a reason="connection refused"``."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._suffix = "" if worker is None else f" worker={worker}"

    def format(self, record: logging.LogRecord) -> str:
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{timestamp}.{int(record.msecs):03d}Z {record.levelname} {record.getMessage()}{self._suffix}"
        if record.exc_info:
            line += " exception=" + json.dumps(self.formatException(record.exc_info))
        return line


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event with its ``name=value`` fields; None values are omitted."""
    if logger.isEnabledFor(level):
        pairs = [f"{key}={_value(value)}" for key, value in fields.items() if value is not None]
        logger.log(level, "%s", " ".join([name, *pairs]))


def defect(logger: logging.Logger, error: Exception, where: str) -> None:
    """Log an internal error: its type and location only, because its text may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else None
    event(logger, "defect", level=logging.ERROR, where=where, error=type(error).__name__, at=location)


def log_to_stderr(level: int = logging.INFO, *, worker: int | None = None) -> None:
    """Log everything to stderr, one line per event; with the number of the ``worker`` if several processes log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(worker))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _value(value: object) -> str:
    text = str(value)
    return text if _bare(text) else json.dumps(text)
