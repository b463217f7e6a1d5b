"""Build Iceberg's runtime for Spark from PyPI packages.

The package of the runtime's jar lacks the shaded Jackson and Apache HTTP client. Other packages contain them under
their original names. This module builds a jar in which their classes have the shaded names that the runtime needs.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

_SHADED = "org/apache/iceberg/shaded/"
_PACKAGES = ("com/fasterxml/jackson/", "org/apache/hc/")
_SERVICES = "META-INF/services/"
#: The runtime refers to this class for TLS settings, but the HTTP client in the packages is too old to contain it.
_MISSING_CLASS = f"{_SHADED}org/apache/hc/client5/http/ssl/TlsSocketStrategy"
_UTF8, _CLASS = 1, 7
#: Tags of constants that occupy two entries, and the size of each constant by tag, except for strings.
_TWO_ENTRIES = (5, 6)
_SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}


def shaded_text(text: bytes) -> bytes:
    """Return text in which class names are replaced by shaded ones."""
    for separator in (b"/", b"."):
        for name in _PACKAGES:
            old = name.encode().replace(b"/", separator)
            text = text.replace(old, _SHADED.encode().replace(b"/", separator) + old)
    return text


def shaded_class(data: bytes) -> bytes:
    """Return a class file whose constants contain shaded class names."""
    (count,) = struct.unpack_from(">H", data, 8)
    offset, number, parts = 10, 1, [data[:10]]
    while number < count:
        tag = data[offset]
        if tag == _UTF8:
            (length,) = struct.unpack_from(">H", data, offset + 1)
            text = shaded_text(data[offset + 3 : offset + 3 + length])
            parts.append(struct.pack(">BH", tag, len(text)) + text)
            offset += 3 + length
        else:
            parts.append(data[offset : offset + 1 + _SIZES[tag]])
            offset += 1 + _SIZES[tag]
        number += 2 if tag in _TWO_ENTRIES else 1
    return b"".join(parts) + data[offset:]


def empty_interface(name: str) -> bytes:
    """Return the class file of an interface without methods."""
    parts = [struct.pack(">IHHH", 0xCAFEBABE, 0, 52, 5)]
    for offset, text in ((1, name), (3, "java/lang/Object")):
        encoded = text.encode()
        parts.append(struct.pack(">BH", _UTF8, len(encoded)) + encoded + struct.pack(">BH", _CLASS, offset))
    return b"".join(parts) + struct.pack(">7H", 0x0601, 2, 4, 0, 0, 0, 0)


def make_shaded_jar(jars: Iterable[Path], output: Path) -> None:
    """Write a jar with the classes and files of other jars, under shaded names."""
    names = set()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as target:
        target.writestr(f"{_MISSING_CLASS}.class", empty_interface(_MISSING_CLASS))
        for jar in jars:
            with zipfile.ZipFile(jar) as source:
                for name in source.namelist():
                    shaded_name = name
                    if name.startswith(_PACKAGES):
                        shaded_name = _SHADED + name
                    elif name.startswith(_SERVICES):
                        shaded_name = _SERVICES + shaded_text(name.removeprefix(_SERVICES).encode()).decode()
                    if name.endswith("/") or shaded_name in names or shaded_name == "META-INF/MANIFEST.MF":
                        continue
                    names.add(shaded_name)
                    data = source.read(name)
                    is_class = name.endswith(".class")
                    target.writestr(shaded_name, shaded_class(data) if is_class else shaded_text(data))
