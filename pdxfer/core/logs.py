"""Logging set-up: text on a terminal, JSON lines otherwise. Called once by each process's entry point.

Inside vLLM's processes we never configure logging; our loggers inherit what vLLM set up.
"""

import json
import logging
import re
import sys
from typing import TextIO

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_TRANSFER = re.compile(r"\bt-[0-9a-f]{16}\b")
"""A transfer id, as ids.py mints it."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the transfer it names and the exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        transfer = _TRANSFER.search(str(entry["message"]))
        if transfer is not None:
            entry["transfer_id"] = transfer[0]
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def own_level() -> str:
    """Least severe level that our loggers let through in this process."""
    return logging.getLevelName(logging.getLogger("pdxfer").getEffectiveLevel())


def set_own_level(level: str) -> None:
    """Change it; nothing else that logs in this process is touched."""
    logging.getLogger("pdxfer").setLevel(level)


def setup_logging(level: str = "INFO", style: str = "auto", stream: TextIO | None = None) -> None:
    """Configure the root logger of this process. `style` is auto, text or json; `stream` defaults to stderr."""
    out = stream if stream is not None else sys.stderr
    as_json = style == "json" or (style == "auto" and not out.isatty())
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(_TEXT, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
