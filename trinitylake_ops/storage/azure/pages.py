"""The pages of a list of blobs, as the service writes them in XML."""

from __future__ import annotations

from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree as ET

_FOLDER = "hdi_isfolder"


class ListedBlob(NamedTuple):
    """A blob of a page. The time has whole seconds."""

    name: str
    size_bytes: int
    last_modified_ms: int


def page_of(document: bytes) -> tuple[list[ListedBlob], str | None]:
    """Return the files of a page, without folders, and where the next page starts, None after the last.

    Raises ValueError for a document that is no such page.
    """
    try:
        root = ET.fromstring(document)
    except ET.ParseError:
        raise ValueError("the answer is no XML") from None
    if root.tag != "EnumerationResults":
        raise ValueError("the answer is no list of blobs")
    blobs = [_blob(element) for element in root.iterfind("Blobs/Blob") if not _is_folder(element)]
    return blobs, root.findtext("NextMarker") or None


def date_ms(text: str) -> int:
    """Return the milliseconds since the epoch of a date of the service. Raises ValueError."""
    moment = parsedate_to_datetime(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()) * 1000


def _is_folder(blob: ET.Element) -> bool:
    """Whether this is a folder: one of a hierarchical account, or the marker of one that programs leave elsewhere."""
    if (blob.findtext("Properties/ResourceType") or "").lower() == "directory":
        return True
    metadata = blob.find("Metadata")
    return metadata is not None and any(
        entry.tag.lower() == _FOLDER and (entry.text or "").lower() == "true" for entry in metadata
    )


def _blob(blob: ET.Element) -> ListedBlob:
    name = blob.find("Name")
    size = blob.findtext("Properties/Content-Length")
    modified = blob.findtext("Properties/Last-Modified")
    if name is None or not name.text or size is None or modified is None:
        raise ValueError("the answer names no blob, size or time")
    text = unquote(name.text) if name.get("Encoded", "").lower() == "true" else name.text
    return ListedBlob(text, int(size), date_ms(modified))
