"""Pages: what an operator has to see of a lakehouse, as one HTML file that needs nothing else.

A headline says it in a sentence, a drawing shows the versions, tables hold the details. Pages are made of data that
``log``, ``expire``, ``status`` and ``verify`` have read already. Beyond that, only the nodes of the latest version's
tree are read. The same input gives the same page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.reports.rendering import check_page_path, write_page
    from trinitylake_ops.reports.status import status_page
    from trinitylake_ops.reports.versions import (
        comparison_page,
        expiration_chart,
        expiration_page,
        log_page,
        verification_chart,
        verification_page,
    )

__all__ = [
    "check_page_path",
    "comparison_page",
    "expiration_chart",
    "expiration_page",
    "log_page",
    "status_page",
    "verification_chart",
    "verification_page",
    "write_page",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rendering": ("check_page_path", "write_page"),
        "status": ("status_page",),
        "versions": (
            "comparison_page",
            "expiration_page",
            "expiration_chart",
            "log_page",
            "verification_page",
            "verification_chart",
        ),
    },
)
