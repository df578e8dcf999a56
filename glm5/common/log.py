"""Logging set-up, called by the command line only. Libraries never configure logging.

    text    12:00:00 INFO glm5.serve.http.access: POST /v1/completions 200 [4bf92f35]
    json    {"time": "...", "level": "INFO", "logger": "glm5.serve.http.access", "message": "...", "request_id": "..."}

A line ends with the id of its HTTP request, if any. JSON lines also contain the fields of `extra`.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

Style = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("glm5-request-id", default="")
"""The id of the HTTP request that a task works on."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s"
_STANDARD = vars(logging.makeLogRecord({})).keys() | {"message", "asctime", "request"}


def configure(level: str = "info", style: Style = "text") -> None:
    """Log glm5's lines of `level` and above, and uvicorn's warnings, to standard error. Other libraries keep their own
    configuration."""
    handler = _Stderr()
    handler.addFilter(_mark)
    handler.setFormatter(_Json() if style == "json" else logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    # Not the root logger: huggingface_hub's lines would be written twice.
    for name, least in (("glm5", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)


def style() -> Style:
    """The configured style, for child processes."""
    handlers = logging.getLogger("glm5").handlers
    return "json" if handlers and isinstance(handlers[0].formatter, _Json) else "text"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a caller that runs a command in its own process may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _mark(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    record.request = f" [{request_id}]" if request_id else ""
    return True


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
