"""Terminal formatting of errors, and signal handling."""

from __future__ import annotations

import logging
import re
from typing import TextIO

from trinitylake_ops.operations.rendering import visible
from trinitylake_ops.storage.options import redact_assignments

#: The maximum number of characters that a message repeats from an input.
MAX_ECHO_CHARS = 200
_SHOWN_CHARS = 60
# An input is either quoted, as by repr(), or a word without spaces, such as an unquoted table name or path.
_LONG = re.compile(
    rf"""(?<!\w)(?P<quote>['"])(?:\\.|(?!(?P=quote))[^\\]){{{MAX_ECHO_CHARS - 1},}}(?P=quote)(?!\w)"""
    rf"""|\S{{{MAX_ECHO_CHARS + 1},}}"""
)


def printable(message: str) -> str:
    """Format a message as one line, with invisible characters escaped and long inputs shortened in the middle."""
    return _LONG.sub(_truncate, visible(redact_assignments(" ".join(message.splitlines()))))


def _truncate(long: re.Match[str]) -> str:
    text = long[0]
    return f"{text[:_SHOWN_CHARS]}... {len(text) - 2 * _SHOWN_CHARS} more ...{text[-_SHOWN_CHARS:]}"


class OneLineFormatter(logging.Formatter):
    """Formats warnings like errors: with the message of an exception, and without a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        text = self.formatMessage(record)
        error = record.exc_info[1] if record.exc_info else None
        return printable(text if error is None else f"{text}: {str(error) or type(error).__name__}")


def log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Log a library's warning. Replaces ``warnings.showwarning``, which would print it unformatted."""
    logging.getLogger("py.warnings").warning("%s", message)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, so that the process cleans up in the same way as after an interrupt."""
