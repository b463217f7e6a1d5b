"""A part of a scan, as a client gets it to fetch its files later: all that is needed to plan that part again.

The text is checked when it comes back, like any request. It is not signed, since it allows nothing. Who may plan a scan
of a table may plan any of its scans, and asks with the same rights.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.server.answers import RefusedError, bad_request

#: The longest request for a scan that is planned in parts, as each part repeats it.
LONGEST_REQUEST_BYTES = 32 << 10
_LONGEST_TASK_CHARS = 64 << 10
_MOST_BYTES = 128 << 10
_VERSION = 2
_MOST_MANIFESTS = 10_000_000
_MOST_FILES = 2**40


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a scan of a snapshot.

    ``first`` and ``last`` bound its manifests of data files, counted in the manifest list. For a part of a single
    manifest, ``after`` is how many entries of it come before the part. ``request`` is what the client asked for.
    """

    table_uuid: str
    snapshot_id: int
    request: dict[str, Any]
    first: int
    last: int
    after: int = 0

    def text(self) -> str:
        """Return the part as a client gets it. Raises RefusedError, 400, where the request is too long to repeat."""
        request = json.dumps(self.request, separators=(",", ":"))
        if len(request) > LONGEST_REQUEST_BYTES:
            raise bad_request(
                f"the scan has too many files for one answer, and a filter of more than {LONGEST_REQUEST_BYTES} bytes;"
                " plan with a shorter one"
            )
        content = [_VERSION, self.table_uuid, self.snapshot_id, request, self.first, self.last, self.after]
        packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), level=6)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def part_of(text: str) -> Part:
    """Return the part that a text is. Raises RefusedError, 404, for any other text."""
    if len(text) > _LONGEST_TASK_CHARS:
        raise no_such_task()
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        inflating = zlib.decompressobj()
        content = json.loads(inflating.decompress(packed, _MOST_BYTES))
        if not inflating.eof or not isinstance(content, list):
            raise no_such_task()
        version, table_uuid, snapshot_id, request, first, last, after = content
        asked = json.loads(request)
    except (ValueError, TypeError, binascii.Error, zlib.error, RecursionError):
        raise no_such_task() from None
    numbers = (version, snapshot_id, first, last, after)
    if not isinstance(table_uuid, str) or not isinstance(asked, dict) or any(type(one) is not int for one in numbers):
        raise no_such_task()
    if version != _VERSION or not 0 <= first <= last <= _MOST_MANIFESTS or not 0 <= after <= _MOST_FILES:
        raise no_such_task()
    return Part(table_uuid, snapshot_id, asked, first, last, after)


def no_such_task() -> RefusedError:
    """Return the error for a task that no plan of this table has."""
    return RefusedError(404, "NoSuchPlanTaskException", "Plan task does not exist; plan the scan again")
