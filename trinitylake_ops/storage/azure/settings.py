"""Roots, options and accounts of Azure Blob Storage."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.http.settings import TIMEOUTS
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, is_secret, is_server_url, read_settings
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: Maximum length of a blob name, including the prefix of the root.
MAX_NAME_CHARACTERS = 1024
#: Maximum number of segments in a blob name.
MAX_NAME_SEGMENTS = 254
#: Maximum size of a Put Blob request body.
MAX_BODY_BYTES = 5000 << 20
#: Maximum number of deletes in a batch.
MAX_NAMES_PER_BATCH = 256
#: Maximum number of names on a page of a listing.
MAX_NAMES_PER_PAGE = 5000

#: Environment variables that determine the account of a root and the user, unless options specify them.
AZURE_ENVIRONMENT = (
    "AZURE_AUTHORITY_HOST", "AZURE_CLIENT_CERTIFICATE_PATH", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET",
    "AZURE_CONFIG_DIR", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "AZURE_TENANT_ID", "AZURE_USERNAME",
)  # fmt: skip

_CONTAINER = re.compile(r"\$root|\$web|[a-z0-9](?:-?[a-z0-9]){2,62}")
ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_ACCOUNT_NAME = Option(
    "account_name",
    "account of an 'az://' root; for an 'abfss://' root, it must be the account of the root",
    pattern=ACCOUNT,
    form="the name of an account: 3 to 24 lower-case letters and digits",
    environment=("AZURE_STORAGE_ACCOUNT_NAME",),
)
#: Credentials. A root uses one of them; environment variables are searched in this order.
_CREDENTIALS = (
    Option(
        "connection_string",
        "connection string of the account",
        Kind.TOKEN,
        is_secret=True,
        environment=("AZURE_STORAGE_CONNECTION_STRING",),
    ),
    Option("account_key", "key of the account", Kind.TOKEN, is_secret=True, environment=("AZURE_STORAGE_ACCOUNT_KEY",)),
    Option(
        "sas_token", "shared access signature", Kind.TOKEN, is_secret=True, environment=("AZURE_STORAGE_SAS_TOKEN",)
    ),
)
#: Options of ``abfss://`` and ``az://`` roots.
AZURE_OPTIONS = (
    _ACCOUNT_NAME,
    *_CREDENTIALS,
    Option(
        "endpoint",
        "URL of the Blob service, for an emulator or another domain; default: 'https://ACCOUNT.blob.core.windows.net'",
        Kind.URL,
    ),
    *TIMEOUTS,
)
# Only Azure hosts are allowed, because a token or signature must not be sent to any other host.
_ACCOUNT_HOST = re.compile(
    r"([a-z0-9]{3,24})((?:\.z\d{1,3})?(?:\.privatelink)?)\.dfs\."
    r"(core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net|core\.cloudapi\.de|storage\.azure\.net)"
)
#: A shared access signature in a root, for example in a pasted link.
_SIGNATURE = re.compile(r"(?i)[?&]sig=")
# The service changes or rejects such names: it replaces "\" by "/", rejects control characters, and drops trailing
# dots.
_INVALID_IN_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f\\]|\.(?:/|$)")


@dataclass(frozen=True, slots=True)
class AzureLocation:
    """Container and name prefix of a root."""

    root: str
    container: str
    #: Empty, or ends with ``/``.
    name_prefix: str
    #: Account of the root. None for an ``az://`` root.
    account_name: str | None
    #: URL of the account's Blob service. None for an ``az://`` root.
    endpoint: str | None

    @classmethod
    def of(cls, root: str) -> AzureLocation:
        """Parse a normalized root URI.

        Raise InvalidLocationError if its form, container, account or length is invalid. The message does not repeat an
        invalid root, which may contain credentials.
        """
        scheme = "az" if root.startswith("az://") else "abfss"
        authority = root.removeprefix(f"{scheme}://").partition("/")[0]
        container, at, host = authority.partition("@")
        account = _ACCOUNT_HOST.fullmatch(host)
        is_valid = bool(account) if scheme == "abfss" else not at
        if not (is_valid and _CONTAINER.fullmatch(container)) or _SIGNATURE.search(root):
            raise InvalidLocationError(
                "invalid Azure root: it must have the form abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX/ or"
                " az://CONTAINER/PREFIX/; set credentials and endpoint by storage options"
            )
        _, path = split_root(root, scheme)
        account_name = account.group(1) if account else None
        endpoint = f"https://{account.group(1)}{account.group(2)}.blob.{account.group(3)}" if account else None
        location = cls(root, container, path[1:], account_name, endpoint)
        if location.name_prefix:
            _check_name(location.name_prefix.removesuffix("/"), root)
        return location

    def name(self, path: str) -> str:
        """Return the blob name for a path. Raise InvalidLocationError if the path or the name is invalid."""
        check_path(path)
        name = self.name_prefix + path
        _check_name(name, path)
        return name

    def listed(self, prefix: str) -> str:
        """Return the blob name prefix for a path prefix. Raise InvalidLocationError if it is invalid."""
        check_prefix(prefix)
        start = self.name_prefix + prefix
        # A prefix may end with a dot, because names may continue after it.
        _check_name(start.rstrip("."), prefix)
        return start

    def path(self, name: str) -> str | None:
        """Return the path of a listed name, or None if no path has such a name (``folder/``, ``a//b``)."""
        path = name.removeprefix(self.name_prefix)
        try:
            self.name(path)
        except InvalidLocationError:
            return None
        return path


@dataclass(frozen=True, slots=True)
class AzureSettings:
    """Validated options. A field is None if the root or environment variables determine its value."""

    endpoint: str | None
    account_name: str | None
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> AzureSettings:
        """Validate options. Raise InvalidInputError, whose message contains no credentials, if they are invalid."""
        credentials = [option.name for option in _CREDENTIALS if option.name in options]
        if len(credentials) > 1:
            raise InvalidInputError(
                f"storage options {credentials[0]!r} and {credentials[1]!r} exclude each other; set one of them"
            )
        return read_settings(cls, AZURE_OPTIONS, options)


def _check_name(name: str, label: str) -> None:
    if _INVALID_IN_NAME.search(name):
        raise InvalidLocationError(
            f"{label[:80]!r} is not a valid blob name: Azure would change it; remove control characters, '\\' and dots"
            " at the end of segments",
            path=label,
        )
    if len(name) > MAX_NAME_CHARACTERS or name.count("/") >= MAX_NAME_SEGMENTS:
        raise InvalidLocationError(
            f"{label[:80]!r}... is too long: with the prefix of the root it has {len(name)} characters and"
            f" {name.count('/') + 1} segments, and Azure allows {MAX_NAME_CHARACTERS} and {MAX_NAME_SEGMENTS}; use a"
            " shorter name",
            path=label,
        )


_PUBLIC_CLOUD = "core.windows.net"


@dataclass(frozen=True, slots=True)
class Account:
    """An account and its credentials. Without a key and a SAS token, azure-identity provides access tokens."""

    #: URL of the Blob service.
    endpoint: str
    name: str
    key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, location: AzureLocation, settings: AzureSettings, options: StorageOptions) -> Account:
        """Resolve the account from the root, the options and environment variables.

        Options take precedence, and the credential comes from a single source.

        Args:
            location: Parsed root.
            settings: Validated options.
            options: The options, with credentials.

        Raises:
            InvalidInputError: There is no account, there are several, or the credential is invalid. The message
                contains no credentials.
        """
        kind, credential = _credential(options)
        parts = _connection_parts(credential) if kind == "connection_string" else {}
        name = _unique_account_name(location.account_name, settings.account_name, parts.get("accountname"))
        name = name or _ACCOUNT_NAME.from_environment()
        if not ACCOUNT.fullmatch(name):
            raise InvalidInputError(
                f"the root {location.root} has no account: set the option 'account_name' or the variable"
                " AZURE_STORAGE_ACCOUNT_NAME, or use a root abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX/"
            )
        key = parts.get("accountkey") if parts else credential if kind == "account_key" else None
        sas_token = parts.get("sharedaccesssignature") if parts else credential if kind == "sas_token" else None
        if key is not None:
            _check_key(key)
        endpoint = settings.endpoint or location.endpoint or _connection_endpoint(parts, name)
        return cls(endpoint.rstrip("/"), name, key, sas_token.removeprefix("?") if sas_token else None)


def _credential(options: StorageOptions) -> tuple[str | None, str]:
    for source in (options, {option.name: option.from_environment() for option in _CREDENTIALS}):
        for option in _CREDENTIALS:
            if credential := source.get(option.name):
                return option.name, credential
    return None, ""


def _connection_parts(text: str) -> Mapping[str, str]:
    """Return the values of a connection string by lower-case name. Raise InvalidInputError if it has no credential."""
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part)
    by_name = {name.strip().lower(): value for name, value in parts.items()}
    has_credential = {"accountkey", "sharedaccesssignature"} & set(by_name)
    if not has_credential:
        raise InvalidInputError(
            "storage option 'connection_string' must contain AccountKey=... or SharedAccessSignature=..., separated by"
            " ';' from other parts"
        )
    return by_name


def _unique_account_name(*names: str | None) -> str | None:
    accounts = {name for name in names if name is not None}
    if len(accounts) > 1:
        raise InvalidInputError(
            "the root and the storage options 'account_name' and 'connection_string' refer to different accounts; use"
            " one account"
        )
    return next(iter(accounts), None)


def _connection_endpoint(parts: Mapping[str, str], name: str) -> str:
    protocol = parts.get("defaultendpointsprotocol", "https")
    endpoint = parts.get("blobendpoint", f"{protocol}://{name}.blob.{parts.get('endpointsuffix', _PUBLIC_CLOUD)}")
    if not is_server_url(endpoint):
        raise InvalidInputError(
            "invalid endpoint in storage option 'connection_string': it must be http://HOST[:PORT] or"
            " https://HOST[:PORT], without credentials"
        )
    return endpoint


def _check_key(key: str) -> None:
    try:
        base64.b64decode(key, validate=True)
    except ValueError:  # includes text that is not ASCII
        raise InvalidInputError("the account key must be Base64-encoded; check the option 'account_key'") from None


def account_of_environment(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a root that environment variables set: account and credential.

    Args:
        root: Normalized root URI.
        options: Options of the root.
    """
    values: dict[str, str] = {}
    if not any(map(is_secret, options)):
        credentials = ((option.name, option.from_environment()) for option in _CREDENTIALS)
        values.update(next(([pair] for pair in credentials if pair[1]), []))
    account = _ACCOUNT_NAME.from_environment()
    if account and root.startswith("az://") and "connection_string" not in {*values, *options}:
        values["account_name"] = account
    return values
