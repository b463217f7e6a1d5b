"""Terminal formatting of errors, and signal handling."""

from __future__ import annotations

import logging
import re
from typing import TextIO

from trinitylake_ops.operations.rendering import visible
from trinitylake_ops.storage.options import redact_assignments

#: No message repeats more characters of an input than this.
LONGEST_ECHO_CHARS = 200
_SHOWN_CHARS = 60
# An input is quoted, as by repr(), or has no space, as names of tables and paths without quotes.
_LONG = re.compile(
    rf"""(?<!\w)(?P<quote>['"])(?:\\.|(?!(?P=quote))[^\\]){{{LONGEST_ECHO_CHARS - 1},}}(?P=quote)(?!\w)"""
    rf"""|\S{{{LONGEST_ECHO_CHARS + 1},}}"""
)


def printable(message: str) -> str:
    """Return a message in its printed form: one line, invisible characters as escapes, long inputs cut inside."""
    return _LONG.sub(_cut, visible(redact_assignments(" ".join(message.splitlines()))))


def _cut(long: re.Match[str]) -> str:
    text = long[0]
    return f"{text[:_SHOWN_CHARS]}... {len(text) - 2 * _SHOWN_CHARS} more ...{text[-_SHOWN_CHARS:]}"


class OneLineFormatter(logging.Formatter):
    """Formats warnings as errors are printed: with the message of an exception, and no traceback."""

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
    """Log a library's warning. It replaces ``warnings.showwarning``, which prints it as it is."""
    logging.getLogger("py.warnings").warning("%s", message)


class Terminated(KeyboardInterrupt):
    """SIGTERM came. The process closes the same things on its way out as after an interrupt."""
