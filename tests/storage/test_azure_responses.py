"""Error responses of Azure, including those that no emulator sends: folders, leases, quotas and tiers."""

from __future__ import annotations

import pytest

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.storage.azure.blob_client import page_of
from trinitylake_ops.storage.azure.errors import error_from_response
from trinitylake_ops.storage.http.requests import Request, StorageRequest
from trinitylake_ops.storage.options import StorageOptions

READ, STAT, CREATE, WRITE, DELETE, LIST = (
    Request.READ, Request.STAT, Request.CREATE, Request.WRITE, Request.DELETE, Request.LIST,
)  # fmt: skip
ROOT = "abfss://box@account.dfs.core.windows.net/lake/"


def error_of(operation: Request, status: int | None, code: str | None, message: str | None = None) -> TrinityLakeError:
    options = StorageOptions({"sas_token": "sv=1&sig=the-signature"})
    return error_from_response(StorageRequest(operation, "a/b", ROOT, options), status, code, message)


@pytest.mark.parametrize(
    ("operation", "status", "code", "error_type"),
    [
        (READ, 404, "BlobNotFound", FileMissingError),
        (STAT, 404, None, FileMissingError),
        (DELETE, 404, "PathNotFound", FileMissingError),
        (DELETE, 409, "DirectoryIsNotEmpty", FileMissingError),
        (READ, 404, "ContainerNotFound", StorageError),
        (CREATE, 404, None, StorageError),
        (CREATE, 409, "ContainerBeingDeleted", StorageError),
        (CREATE, 409, "BlobAlreadyExists", FileExistsAlreadyError),
        (CREATE, 409, "PathAlreadyExists", FileExistsAlreadyError),
        (CREATE, 412, "ConditionNotMet", FileExistsAlreadyError),
        (CREATE, 412, "LeaseIdMissing", FileExistsAlreadyError),
        (CREATE, 412, None, FileExistsAlreadyError),
        (WRITE, 412, "LeaseIdMissing", StorageError),
        (WRITE, 409, "BlobImmutableDueToPolicy", StoragePermissionError),
        (WRITE, 409, "ResourceTypeMismatch", StorageError),
        (READ, 409, "BlobArchived", StorageError),
        (CREATE, 400, "InvalidUri", InvalidLocationError),
        (CREATE, 400, "OutOfRangeInput", InvalidLocationError),
        (CREATE, 413, "RequestBodyTooLarge", StorageError),
        (CREATE, 507, None, StorageFullError),
        (CREATE, 403, "AuthorizationPermissionMismatch", StoragePermissionError),
        (CREATE, 403, "UnauthorizedBlobOverwrite", StoragePermissionError),
        (LIST, 401, "NoAuthenticationInformation", StoragePermissionError),
        (LIST, 409, "PublicAccessNotPermitted", StoragePermissionError),
        (CREATE, 503, "ServerBusy", ThrottledError),
        (READ, 429, "TooManyRequests", ThrottledError),
        (CREATE, 429, None, AmbiguousWriteError),
        (CREATE, 500, "OperationTimedOut", AmbiguousWriteError),
        (CREATE, 500, "InternalError", AmbiguousWriteError),
        (CREATE, 503, None, AmbiguousWriteError),
        (CREATE, 408, None, AmbiguousWriteError),
        (CREATE, 409, None, AmbiguousWriteError),
        (READ, 500, "InternalError", TransientError),
        (CREATE, 400, "Md5Mismatch", TransientError),
        (READ, 307, None, StorageError),
        (CREATE, 501, "NotImplemented", StorageError),
        (CREATE, 400, "SomethingNew", StorageError),
    ],
)
def test_each_response_maps_to_its_error(
    operation: Request, status: int, code: str | None, error_type: type[TrinityLakeError]
) -> None:
    error = error_of(operation, status, code, "Something failed.\nRequestId:1\nsig=the-signature")
    assert type(error) is error_type
    message = str(error)
    assert "\n" not in message
    assert "the-signature" not in message


def test_missing_container_is_reported() -> None:
    assert "container 'box' does not exist" in str(error_of(LIST, 404, "ContainerNotFound"))


def test_quoted_secrets_in_service_messages_are_redacted() -> None:
    message = "Signature did not match. String to sign used was rwd AccountKey=hush&sig=hush%3D"
    assert "hush" not in str(error_of(CREATE, 400, "SomethingNew", message))
    assert "String to sign" not in str(error_of(CREATE, 403, "AuthenticationFailed", message))


_PAGE = """<?xml version="1.0" encoding="utf-8"?>
<EnumerationResults ServiceEndpoint="https://account.blob.core.windows.net/" ContainerName="box"><Prefix>lake/</Prefix>
<Blobs>{blobs}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"""
_BLOB = (
    "<Blob><Name{encoded}>{name}</Name><Properties><Last-Modified>Tue, 24 Nov 2026 12:00:01 GMT</Last-Modified>"
    "<Content-Length>{size}</Content-Length>{properties}</Properties>{metadata}</Blob>"
)


def blob(name: str, size: int = 0, *, encoded: str = "", properties: str = "", metadata: str = "") -> str:
    return _BLOB.format(name=name, size=size, encoded=encoded, properties=properties, metadata=metadata)


def test_pages_contain_files_without_folders() -> None:
    """Folders have a resource type in hierarchical accounts, and are marked with metadata in other accounts."""
    folder = "<Metadata><hdi_isfolder>true</hdi_isfolder></Metadata>"
    blobs = [
        blob(
            "lake/a",
            3,
            properties="<ResourceType>file</ResourceType>",
            metadata="<Metadata><Owner>x</Owner></Metadata>",
        ),
        blob("lake/typed", properties="<ResourceType>directory</ResourceType>"),
        blob("lake/marked", metadata=folder),
        blob("lake/Marked", metadata=folder.replace("hdi_isfolder", "Hdi_IsFolder").replace("true", "True")),
        blob("lake/unmarked", metadata=folder.replace("true", "false")),
        blob("lake/%EF%BF%BE%2525", encoded=' Encoded="true"'),
        blob("lake/&amp;%41"),
    ]
    entries, marker = page_of(_PAGE.format(blobs="".join(blobs), marker="next").encode())
    assert [entry.name for entry in entries] == ["lake/a", "lake/unmarked", "lake/\ufffe%25", "lake/&%41"]
    assert (entries[0].size_bytes, entries[0].last_modified_ms) == (3, 1_795_521_601_000)
    assert marker == "next"
    assert page_of(_PAGE.format(blobs="", marker="").encode()) == ([], None)


@pytest.mark.parametrize(
    "document",
    [
        b"", b"<html><body>hello</body>", b"<Error/>",
        _PAGE.format(blobs="<Blob><Name>a</Name><Properties/></Blob>", marker="").encode(),
        _PAGE.format(blobs=blob("a").replace("24 Nov", "soon"), marker="").encode(),
    ],
)  # fmt: skip
def test_invalid_pages_are_rejected(document: bytes) -> None:
    with pytest.raises(ValueError):
        page_of(document)
