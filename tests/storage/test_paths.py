"""Validation of paths and prefixes, with random text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.paths import check_path, check_prefix

TEXT = st.text(st.sampled_from("./a\0é\udc80 %"), max_size=8)


def accepts(check: object, text: str) -> bool:
    assert callable(check)
    try:
        check(text)
    except InvalidLocationError:
        return False
    return True


@given(TEXT)
def test_accepted_paths_stay_below_the_root(path: str) -> None:
    segments = path.split("/")
    is_harmful = any(segment in ("", ".", "..") for segment in segments) or "\0" in path or "\udc80" in path
    assert accepts(check_path, path) == (not is_harmful)


@given(TEXT)
def test_accepted_prefixes_are_those_of_accepted_paths(prefix: str) -> None:
    starts_a_path = any(accepts(check_path, prefix + suffix) for suffix in ("", "a"))
    is_parent_reference = prefix.rpartition("/")[2] in (".", "..")
    assert accepts(check_prefix, prefix) == (starts_a_path and not is_parent_reference)
