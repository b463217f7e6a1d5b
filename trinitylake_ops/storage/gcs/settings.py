"""Roots ``gs://bucket/prefix/`` and their options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.http.settings import TIMEOUTS, BucketLocation
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, read_settings

#: Maximum number of objects on one page of a listing.
MAX_NAMES_PER_PAGE = 1000
#: Maximum number of calls in one batch.
MAX_CALLS_PER_BATCH = 100
#: Value of ``credentials`` for requests without credentials.
ANONYMOUS = "anonymous"
#: Environment variable with the address of an emulator. All Google clients read it.
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"

#: Environment variables that determine the server of a root and the user, unless options specify them.
GCS_ENVIRONMENT = (
    "CLOUDSDK_ACTIVE_CONFIG_NAME", "CLOUDSDK_CONFIG", "GCE_METADATA_HOST", CREDENTIALS_VARIABLE,
    "GOOGLE_CLOUD_QUOTA_PROJECT", "GOOGLE_CLOUD_UNIVERSE_DOMAIN", EMULATOR_VARIABLE,
)  # fmt: skip

#: Types of credentials that an option may contain. Other types refer to programs and URLs, which only the environment
#: may set.
KINDS_OF_CREDENTIALS = ("service_account", "authorized_user")
#: Secret fields of credentials.
_SECRET_PARTS = ("client_secret", "private_key", "private_key_id", "refresh_token")

#: Size limit of a credentials file.
_MAX_CREDENTIALS_BYTES = 64 << 10
#: Lines of a private key that are shorter than this are not redacted.
_MIN_SECRET_LINE = 8

#: Options of ``gs://`` roots.
GCS_OPTIONS = (
    Option(
        "credentials",
        "Google Cloud credentials; default: the application default credentials",
        pattern=re.compile(r"(?s).*\S.*"),
        form=f"'{ANONYMOUS}', the absolute path of a JSON file, or the text of such a file",
        is_secret=True,
        environment=(CREDENTIALS_VARIABLE,),
    ),
    Option(
        "project",
        "project to bill for requests to buckets with requester pays",
        pattern=re.compile(r"[a-z0-9][a-z0-9.:-]{1,98}[a-z0-9]"),
        form="a Google Cloud project ID",
    ),
    Option(
        "endpoint",
        "URL of another server, without a path",
        Kind.URL,
        pattern=re.compile(r"https?://[^/]*/?"),
        environment=(EMULATOR_VARIABLE,),
    ),
    *TIMEOUTS,
)
_LINE_BREAKS = re.compile(r"[\r\n]")
_RESERVED_PREFIX = ".well-known/acme-challenge/"


class GcsLocation(BucketLocation):
    """Bucket and key prefix of a root on Google Cloud Storage, where a key is called an object name."""

    __slots__ = ()
    scheme = "gs"
    service = "Google Cloud Storage"
    bucket_name = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
    root_form = (
        "invalid Google Cloud Storage root: it must have the form gs://BUCKET/PREFIX/, where BUCKET has at least 3"
        " lower-case letters, digits, '.', '_' and '-'; set credentials and endpoint by storage options"
    )

    def check_key(self, key: str, label: str) -> None:
        """Raise InvalidLocationError if a key is too long, or is not a valid name of an object.

        Args:
            key: The key.
            label: The path or root, for the message.
        """
        BucketLocation.check_key(self, key, label)
        if _LINE_BREAKS.search(key) or key.startswith(_RESERVED_PREFIX):
            raise InvalidLocationError(
                f"{label[:80]!r} is not a valid object name on Google Cloud Storage: it contains a line break or begins"
                f" with {_RESERVED_PREFIX!r}; use another name"
            )


@dataclass(frozen=True, slots=True)
class GcsSettings:
    """Validated options. A field is None if Google's environment variables determine it. ``repr`` hides credentials."""

    endpoint: str | None
    project: str | None
    #: ``anonymous``, the absolute path of a JSON file, or the parsed contents of such a file.
    credentials: str | Mapping[str, Any] | None = field(repr=False)
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> GcsSettings:
        """Validate options. Raise InvalidInputError, whose message contains no credentials, if they are invalid."""
        settings = read_settings(cls, GCS_OPTIONS, options, credentials=_credentials(options.get("credentials")))
        if settings.endpoint:
            return replace(settings, endpoint=settings.endpoint.rstrip("/"))
        if settings.credentials is None and _emulator():
            return replace(settings, credentials=ANONYMOUS)  # like Google's clients, which send emulators no token
        return settings

    @property
    def secrets(self) -> tuple[str, ...]:
        """Parts of the credentials that messages must not contain."""
        if not isinstance(self.credentials, Mapping):
            return ()
        texts = [str(self.credentials[part]) for part in _SECRET_PARTS if self.credentials.get(part)]
        return (*texts, *(line for text in texts for line in text.split("\n") if len(line) >= _MIN_SECRET_LINE))


def check_kind(credentials: object) -> Mapping[str, Any]:
    """Return parsed credentials. Raise ValueError, whose message contains no credentials, if the type is invalid."""
    if not isinstance(credentials, Mapping) or credentials.get("type") not in KINDS_OF_CREDENTIALS:
        raise ValueError(f"credentials must be a JSON object whose 'type' is one of {', '.join(KINDS_OF_CREDENTIALS)}")
    return credentials


def gcs_of_environment(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a root that environment variables set: endpoint and credentials.

    Credentials are returned as the text of the file, because the file does not exist on other machines.

    Args:
        root: Normalized root URI.
        options: Options of the root.
    """
    del root  # the same for every root
    emulator = None if "endpoint" in options else _emulator()
    values = {} if emulator is None else {"endpoint": emulator}
    if "credentials" not in options:
        text = ANONYMOUS if emulator else _read_credentials(os.environ.get(CREDENTIALS_VARIABLE))
        values |= {"credentials": text} if text else {}
    return values


def _emulator() -> str | None:
    host = os.environ.get(EMULATOR_VARIABLE, "")
    if host in ("", "default"):
        return None
    return host if host.startswith(("http://", "https://")) else f"http://{host}"


def _read_credentials(path: str | None) -> str | None:
    """Return the text of a credentials file, or None if it cannot be read or may not be passed as an option.

    The request then looks for credentials itself, and reports the error.
    """
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CREDENTIALS_BYTES)
        check_kind(json.loads(text))
    except (OSError, ValueError, RecursionError):
        return None
    return text


def _credentials(value: str | None) -> str | Mapping[str, Any] | None:
    if value is None or value == ANONYMOUS or value.startswith("/"):
        return value
    try:
        return check_kind(json.loads(value))
    except (ValueError, RecursionError):
        pass  # not chained, because the parser's error quotes the text
    raise InvalidInputError(
        f"storage option 'credentials' must be {ANONYMOUS!r}, the absolute path of a JSON file, or the text of such a"
        f" file whose 'type' is one of {', '.join(KINDS_OF_CREDENTIALS)}; set other types by Google's environment"
        " variables"
    )
