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

#: The service gives at most this many objects in one page of a list.
MAX_NAMES_PER_PAGE = 1000
#: The service takes at most this many calls in one batch.
MAX_CALLS_PER_BATCH = 100
#: The value of ``credentials`` for requests without any.
ANONYMOUS = "anonymous"
#: The variable with the address of an emulator, as all of Google's clients read it.
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"

#: Variables that decide which server a root is on, and which user asks, if the options do not.
GCS_ENVIRONMENT = (
    "CLOUDSDK_ACTIVE_CONFIG_NAME", "CLOUDSDK_CONFIG", "GCE_METADATA_HOST", CREDENTIALS_VARIABLE,
    "GOOGLE_CLOUD_QUOTA_PROJECT", "GOOGLE_CLOUD_UNIVERSE_DOMAIN", EMULATOR_VARIABLE,
)  # fmt: skip

#: Kinds of credentials that an option may hold. Others name programs and addresses, which only the environment may.
KINDS_OF_CREDENTIALS = ("service_account", "authorized_user")
#: What is secret in the text of credentials.
_SECRET_PARTS = ("client_secret", "private_key", "private_key_id", "refresh_token")

#: No file of credentials is larger.
_MAX_CREDENTIALS_BYTES = 64 << 10
#: A shorter line of a key is no secret.
_MIN_SECRET_LINE = 8

#: Options of ``gs://`` roots.
GCS_OPTIONS = (
    Option(
        "credentials",
        "credentials of Google Cloud; without them the application default credentials are used",
        pattern=re.compile(r"(?s).*\S.*"),
        form=f"'{ANONYMOUS}', the absolute path of a JSON file, or the text of such a file",
        is_secret=True,
        environment=(CREDENTIALS_VARIABLE,),
    ),
    Option(
        "project",
        "project that pays for requests, for buckets whose requester pays",
        pattern=re.compile(r"[a-z0-9][a-z0-9.:-]{1,98}[a-z0-9]"),
        form="the id of a project of Google Cloud",
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
_NEVER_A_NAME = ".well-known/acme-challenge/"


class GcsLocation(BucketLocation):
    """Bucket and key prefix of a root on Google Cloud Storage, which calls a key the name of an object."""

    __slots__ = ()
    scheme = "gs"
    service = "Google Cloud Storage"
    bucket_name = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
    root_form = (
        "a root on Google Cloud Storage has the form gs://BUCKET/PREFIX/, with at least 3 lower-case letters, digits,"
        " '.', '_' or '-' as BUCKET; credentials and the server's address are storage options"
    )

    def check_key(self, key: str, shown: str) -> None:
        """Raise InvalidLocationError for a key that is too long, or that the service gives to no object."""
        BucketLocation.check_key(self, key, shown)
        if _LINE_BREAKS.search(key) or key.startswith(_NEVER_A_NAME):
            raise InvalidLocationError(
                f"Google Cloud Storage has no object named {shown[:80]!r}: names hold no line break and do not begin"
                f" with {_NEVER_A_NAME!r}"
            )


@dataclass(frozen=True, slots=True)
class GcsSettings:
    """The checked options of a root. None means that Google's environment decides.

    ``credentials`` are ``anonymous``, the absolute path of a JSON file, or what such a file holds. No text form of
    this object shows them.
    """

    endpoint: str | None
    project: str | None
    credentials: str | Mapping[str, Any] | None = field(repr=False)
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> GcsSettings:
        """Check the options. Raises InvalidInputError, which repeats no credentials."""
        settings = read_settings(cls, GCS_OPTIONS, options, credentials=_credentials(options.get("credentials")))
        if settings.endpoint:
            return replace(settings, endpoint=settings.endpoint.rstrip("/"))
        if settings.credentials is None and _emulator():
            return replace(settings, credentials=ANONYMOUS)  # as Google's own clients do: an emulator gets no token
        return settings

    @property
    def secrets(self) -> tuple[str, ...]:
        """The parts of the credentials that no message may repeat."""
        if not isinstance(self.credentials, Mapping):
            return ()
        texts = [str(self.credentials[part]) for part in _SECRET_PARTS if self.credentials.get(part)]
        return (*texts, *(line for text in texts for line in text.split("\n") if len(line) >= _MIN_SECRET_LINE))


def check_kind(credentials: object) -> Mapping[str, Any]:
    """Return credentials as a mapping. Raises ValueError, which repeats nothing, for another form or kind."""
    if not isinstance(credentials, Mapping) or credentials.get("type") not in KINDS_OF_CREDENTIALS:
        raise ValueError(f"credentials are a JSON object whose 'type' is one of {', '.join(KINDS_OF_CREDENTIALS)}")
    return credentials


def gcs_of_environment(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the endpoint and the credentials that the environment gives to a root with these options.

    Credentials are the text of a file that an option may hold, as the file is on no other machine.
    """
    del root  # the same for every root
    emulator = None if "endpoint" in options else _emulator()
    found = {} if emulator is None else {"endpoint": emulator}
    if "credentials" not in options:
        text = ANONYMOUS if emulator else _text_of(os.environ.get(CREDENTIALS_VARIABLE))
        found |= {"credentials": text} if text else {}
    return found


def _emulator() -> str | None:
    host = os.environ.get(EMULATOR_VARIABLE, "")
    if host in ("", "default"):
        return None
    return host if host.startswith(("http://", "https://")) else f"http://{host}"


def _text_of(path: str | None) -> str | None:
    """Return the text of a file of credentials, None where an option may not hold it or where it cannot be read.

    Whoever sends a request then looks for credentials itself, and says what is wrong.
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
        # Not repeated, and not chained: a parser's error quotes the text.
        reason = f"whose 'type' is one of {', '.join(KINDS_OF_CREDENTIALS)}"
    raise InvalidInputError(
        f"storage option 'credentials' must be {ANONYMOUS!r}, the absolute path of a JSON file, or the text of one, "
        f"{reason}; Google's environment takes every other kind"
    )
