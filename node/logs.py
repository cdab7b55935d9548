"""Set-up of the logs of the process: lines on stderr, as text or as JSON. (Shell.)

Every message of the package is text with `key=value` facts. Both formats have the time in UTC, the
level, the node and the logger. One record is always one line, whatever its content. Nothing else in
the package configures logging: a library leaves that to its application.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

PACKAGE = "raftq"


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info node=1 raftq.node.app message`"""

    def __init__(self, node_id: int | None) -> None:
        super().__init__()
        self._node = "" if node_id is None else f" node={node_id}"

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_moment(record)} {record.levelname.lower()}{self._node} {record.name}"]
        parts.append(_one_line(_message(record)))
        error = _error(self, record)
        if error:
            parts.append(f"error={_one_line(error)}")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, node, logger, message, and error when there is one."""

    def __init__(self, node_id: int | None) -> None:
        super().__init__()
        self._node = node_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "message": _message(record),
        }
        error = _error(self, record)
        if error:
            line["error"] = error
        return json.dumps(line, ensure_ascii=False)


FORMATTERS: dict[str, type[TextFormatter] | type[JsonFormatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
}


def set_up_logs(
    level: str, form: str, *, node_id: int | None = None, stream: TextIO | None = None
) -> None:
    """Send everything from `level` up to stderr; other loggers only from warning up.

    A second call replaces the first set-up.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(FORMATTERS[form](node_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, getattr(logging, level.upper())))
    logging.getLogger(PACKAGE).setLevel(level.upper())
    # A full disk or a closed pipe under stderr must not stop a node.
    logging.raiseExceptions = False


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError) as error:
        return f"{record.msg!r} with {record.args!r} ({error})"


def _error(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    found = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        found.append(formatter.formatStack(record.stack_info))
    return "\n".join(found)


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
