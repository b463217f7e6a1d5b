"""Who hears of groups that were committed: whoever counts them. Nobody does unless a server asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Called with the number of transactions of each group that became a version, by the thread that committed it.
groups: set[Callable[[int], None]] = set()


def tell_of_group(n_members: int) -> None:
    """Tell all who want to hear that a group of so many transactions became a version."""
    for hear in tuple(groups):
        try:
            hear(n_members)
        except Exception:  # whoever counts must not fail a commit
            logger.warning("what hears of groups failed; the commit stands", exc_info=True)
