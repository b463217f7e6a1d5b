"""HTML reports: the state of a lakehouse as one self-contained HTML file for operators.

A report has a headline, a chart and tables with details. Reports are built from data that ``log``, ``expire``,
``space``, ``status`` and ``verify`` have already read; in addition, only the nodes of the latest version's tree are
read. The same input always produces the same report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.reports.rendering import check_page_path, write_page
    from trinitylake_ops.reports.space import space_chart, space_page
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
    "space_chart",
    "space_page",
    "status_page",
    "verification_chart",
    "verification_page",
    "write_page",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rendering": ("check_page_path", "write_page"),
        "space": ("space_chart", "space_page"),
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
