"""Unique credentials, and a search for them in text and files."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

ACCESS_KEY_ID = "LEAKCANARYKEY0000001"
SECRET_ACCESS_KEY = "LeakCanarySecret/Of+The/Tests0123456789="
SESSION_TOKEN = "LeakCanarySessionToken//Of+The/Tests0123456789=="
#: Rejected by every server that checks credentials.
WRONG_ACCESS_KEY_ID = "LEAKCANARYWRONGKEY01"
WRONG_SECRET_ACCESS_KEY = "LeakCanaryWrongSecret/Of+The/Tests01234="

VALID_CREDENTIALS = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
CANARIES = (
    ACCESS_KEY_ID, SECRET_ACCESS_KEY, SESSION_TOKEN, WRONG_ACCESS_KEY_ID, WRONG_SECRET_ACCESS_KEY,
)  # fmt: skip

_BASE64_LETTER_BITS, _BYTE_BITS = 6, 8
# Details of signed requests that S3 and its clients log. They are not credentials, but must not be shown either.
_SIGNATURES = re.compile(rb"Signature=|X-Amz-Signature|AWS4-HMAC-SHA256|StringToSign|CanonicalRequest|<Error>")


def _encodings_of(canary: str) -> Iterator[bytes]:
    """Yield the possible encodings of a value."""
    plain = canary.encode()
    yield plain
    yield quote(canary, safe="").encode()
    yield quote_plus(canary).encode()
    yield plain.hex().encode()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):  # the value starts at any position of a longer encoded text
            encoded = encode(bytes(shift) + plain + bytes(3))
            start = -(-shift * _BYTE_BITS // _BASE64_LETTER_BITS)
            yield encoded[start : (shift + len(plain)) * _BYTE_BITS // _BASE64_LETTER_BITS]


_ENCODINGS = {encoding: canary for canary in CANARIES for encoding in _encodings_of(canary)}
_ANY_ENCODING = re.compile(b"|".join(re.escape(encoding) for encoding in _ENCODINGS), re.IGNORECASE)


def leaks(text: str | bytes) -> list[str]:
    """Return an excerpt for each credential or signature in a text, in any encoding. Tests expect none."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    matches = [*_ANY_ENCODING.finditer(data), *_SIGNATURES.finditer(data)]
    return [data[max(0, match.start() - 80) : match.end() + 40].decode("utf-8", "replace") for match in matches]


def leaks_in_files(folder: Path) -> list[str]:
    """Return the leaks in names and contents of all files below a folder."""
    matches = []
    for path in folder.rglob("*"):
        matches += leaks(str(path))
        if path.is_file():
            matches += [f"{path}: {leak}" for leak in leaks(path.read_bytes())]
    return matches
