"""Structured logs: one JSON object a line on standard error, whatever is in it. No user data but ids."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LOGGERS = ("semel.serving", "uvicorn.error")


class JsonLines(logging.Formatter):
    """``time``, ``level``, ``process`` (its id), ``logger``, ``message``; ``exception`` where there is one; a message
    that is itself an object gives its fields. What a client sent cannot forge a line or a field: JSON quotes it, in
    ASCII, so that no line break or escape sequence of any terminal gets through."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(), "process": record.process, "logger": record.name}
        if isinstance(record.msg, dict):
            line |= {name: value for name, value in record.msg.items() if name not in line}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: str = "warning") -> None:
    """Send the server's logs there, from ``level`` on."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(JsonLines())
            logger.addHandler(handler)
            logger.propagate = False
        # uvicorn's own lines of information say nothing that a line a request does not
        logger.setLevel(level.upper() if name == LOGGERS[0] else logging.WARNING)
