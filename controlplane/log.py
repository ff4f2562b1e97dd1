"""Log lines for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from controlplane.request_origin import present_origin


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at``, ``level``, ``logger``, ``message``, and ``request_id`` and ``exception`` where
    there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"at": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if request_id := present_origin().request_id:
            said["request_id"] = request_id
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)
