"""Recompute checksums in mutated files, so that decoders reach the mutation."""

from __future__ import annotations

import hashlib
import re

import google_crc32c

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format import definitions
from trinitylake_ops.format import definitions_pb2 as pb
from trinitylake_ops.format.definitions import SavedTransaction

_SHA256_BYTES = 32


def reseal_file(data: bytes, path: str) -> bytes:
    """Return a file with correct checksums for its bytes and path, if it has any (FORMAT.md, "Checksums")."""
    name = path.rpartition("/")[2].encode()
    checksum = re.compile(rb"[0-9a-f]{8} " + re.escape(name))
    if not checksum.search(data):
        return data
    blank = b"00000000 " + name
    data = checksum.sub(blank, data)
    return data.replace(blank, f"{google_crc32c.value(data):08x} ".encode() + name)


def reseal_verified_record(data: bytes, path: str) -> bytes:
    """Append the SHA-256 to a mutated record of verified files."""
    body = reseal_file(data, path)
    if hashlib.sha256(body[:-_SHA256_BYTES]).digest() != body[-_SHA256_BYTES:]:
        body += hashlib.sha256(body).digest()
    return body


def reseal_saved_transaction(data: bytes, path: str) -> bytes:
    """Return a saved transaction with the checksum of its content, if it can be decoded."""
    try:
        message = definitions._parse(data, pb.SavedTransaction, path)
        saved = definitions._from_message(SavedTransaction, message)
        message.checksum = saved._checksum()
    except TrinityLakeError:
        return data
    return reseal_file(message.SerializeToString(), path)
