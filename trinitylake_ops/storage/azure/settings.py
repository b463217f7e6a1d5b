"""Options and account of Azure Blob Storage."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.http.settings import TIMEOUTS
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, is_secret, is_server_url, read_settings
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: Azure limits the name of a blob, the prefix of the root included, to this many characters.
MAX_NAME_CHARACTERS = 1024
#: And to this many segments.
MAX_NAME_SEGMENTS = 254
#: The largest body of one Put Blob, in bytes.
MAX_BODY_BYTES = 5000 << 20
#: A batch has at most this many deletes.
MAX_NAMES_PER_BATCH = 256
#: A page of a list has at most this many names.
MAX_NAMES_PER_PAGE = 5000

#: Variables that decide which account a root is in, and which user asks, if the options do not.
AZURE_ENVIRONMENT = (
    "AZURE_AUTHORITY_HOST", "AZURE_CLIENT_CERTIFICATE_PATH", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET",
    "AZURE_CONFIG_DIR", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "AZURE_TENANT_ID", "AZURE_USERNAME",
)  # fmt: skip

_CONTAINER = re.compile(r"\$root|\$web|[a-z0-9](?:-?[a-z0-9]){2,62}")
ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_ACCOUNT_NAME = Option(
    "account_name",
    "account of an 'az://' root; it must not differ from the account of an 'abfss://' root",
    pattern=ACCOUNT,
    form="the name of an account, 3 to 24 lower-case letters and digits",
    environment=("AZURE_STORAGE_ACCOUNT_NAME",),
)
#: Credentials, of which a root has one, in the order in which the environment is searched for them.
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
CLIENT = Option(
    "client",
    "library that sends the requests",
    Kind.CHOICE,
    default="azure-storage-blob",
    choices=("azure-storage-blob", "obstore"),
)
#: Options of ``abfss://`` and ``az://`` roots.
AZURE_OPTIONS = (
    _ACCOUNT_NAME,
    *_CREDENTIALS,
    Option(
        "endpoint",
        "URL of the Blob service, for an emulator or another domain; without it 'https://ACCOUNT.blob.core.windows.net'",
        Kind.URL,
    ),
    CLIENT,
    *TIMEOUTS,
)
# Only hosts of Azure: a token or signature that went to another host would be given away.
_ACCOUNT_HOST = re.compile(
    r"([a-z0-9]{3,24})((?:\.z\d{1,3})?(?:\.privatelink)?)\.dfs\."
    r"(core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net|core\.cloudapi\.de|storage\.azure\.net)"
)
#: Parts of a shared access signature: whoever pastes a link with one into a root shows it.
_SIGNATURE = re.compile(r"(?i)[?&]sig=")
# The service stores other names than these: it takes "\" for "/", refuses control characters, and drops last dots.
_NOT_IN_A_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f\\]|\.(?:/|$)")


@dataclass(frozen=True, slots=True)
class AzureLocation:
    """Container and name prefix of a root; the prefix is empty or ends with ``/``.

    ``account_name`` and ``endpoint``, the URL of the Blob service, are None where the root does not name an account.
    """

    root: str
    container: str
    name_prefix: str
    account_name: str | None
    endpoint: str | None

    @classmethod
    def of(cls, root: str) -> AzureLocation:
        """Split a normalized root URI.

        Raises InvalidLocationError for another form, for a root that is too long, and for a container or account that
        has no name of one. Such text may be a credential: no message repeats a root of another form.
        """
        scheme = "az" if root.startswith("az://") else "abfss"
        authority = root.removeprefix(f"{scheme}://").partition("/")[0]
        container, at, host = authority.partition("@")
        account = _ACCOUNT_HOST.fullmatch(host)
        has_form = bool(account) if scheme == "abfss" else not at
        if not (has_form and _CONTAINER.fullmatch(container)) or _SIGNATURE.search(root):
            raise InvalidLocationError(
                "a root on Azure has the form abfss://container@ACCOUNT.dfs.core.windows.net/PREFIX/ or"
                " az://CONTAINER/PREFIX/; credentials and another server's address are storage options"
            )
        _, path = split_root(root, scheme)
        account_name = account.group(1) if account else None
        endpoint = f"https://{account.group(1)}{account.group(2)}.blob.{account.group(3)}" if account else None
        location = cls(root, container, path[1:], account_name, endpoint)
        if location.name_prefix:
            _check_name(location.name_prefix.removesuffix("/"), root)
        return location

    def name(self, path: str) -> str:
        """Return the name of the blob of a path.

        Raises InvalidLocationError for a path that no storage accepts, that is too long, or that the service would
        take for another.
        """
        check_path(path)
        name = self.name_prefix + path
        _check_name(name, path)
        return name

    def listed(self, prefix: str) -> str:
        """Return the start of all names below a path prefix. Raises InvalidLocationError as ``name`` does."""
        check_prefix(prefix)
        start = self.name_prefix + prefix
        # A name may go on after a dot at the end of its prefix.
        _check_name(start.rstrip("."), prefix)
        return start

    def path(self, name: str) -> str | None:
        """Return the path of a listed name, or None for a name that no path has (``folder/``, ``a//b``)."""
        path = name.removeprefix(self.name_prefix)
        try:
            self.name(path)
        except InvalidLocationError:
            return None
        return path


@dataclass(frozen=True, slots=True)
class AzureSettings:
    """The checked options of a root. None means that the root or the environment decides."""

    endpoint: str | None
    account_name: str | None
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> AzureSettings:
        """Check the options. Raises InvalidInputError, which repeats no credentials."""
        given = [option.name for option in _CREDENTIALS if option.name in options]
        if len(given) > 1:
            raise InvalidInputError(
                f"storage options {given[0]!r} and {given[1]!r} exclude each other: give one of them"
            )
        return read_settings(cls, AZURE_OPTIONS, options)


def _check_name(name: str, shown: str) -> None:
    if _NOT_IN_A_NAME.search(name):
        raise InvalidLocationError(
            f"Azure would take {shown[:80]!r} for another name: leave out control characters, '\\', and dots at the"
            " end of a segment",
            path=shown,
        )
    if len(name) > MAX_NAME_CHARACTERS or name.count("/") >= MAX_NAME_SEGMENTS:
        raise InvalidLocationError(
            f"{shown[:80]!r}... would have {len(name)} characters in {name.count('/') + 1} segments with its root;"
            f" Azure allows {MAX_NAME_CHARACTERS} in {MAX_NAME_SEGMENTS}: use a shorter name",
            path=shown,
        )


_PUBLIC_CLOUD = "core.windows.net"


@dataclass(frozen=True, slots=True)
class Account:
    """URL of a Blob service, and one kind of credentials for it; with none, a token of azure-identity is asked for."""

    endpoint: str
    name: str
    key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, location: AzureLocation, settings: AzureSettings, options: StorageOptions) -> Account:
        """Find out by the root, the options and the environment. Options go first, and no two sources are mixed.

        Raises InvalidInputError, which repeats no credentials, if no account is named, two differ, or a credential has
        no form of one.
        """
        kind, credential = _credential(options)
        parts = _connection_parts(credential) if kind == "connection_string" else {}
        name = _one_name(location.account_name, settings.account_name, parts.get("accountname"))
        name = name or _ACCOUNT_NAME.from_environment()
        if not ACCOUNT.fullmatch(name):
            raise InvalidInputError(
                f"the root {location.root} names no account: give the option 'account_name' or the variable"
                " AZURE_STORAGE_ACCOUNT_NAME, or a root abfss://container@ACCOUNT.dfs.core.windows.net/PREFIX/"
            )
        key = parts.get("accountkey") if parts else credential if kind == "account_key" else None
        sas_token = parts.get("sharedaccesssignature") if parts else credential if kind == "sas_token" else None
        if key is not None:
            _check_key(key)
        endpoint = settings.endpoint or location.endpoint or _endpoint_of(parts, name)
        return cls(endpoint.rstrip("/"), name, key, sas_token.removeprefix("?") if sas_token else None)


def _credential(options: StorageOptions) -> tuple[str | None, str]:
    for source in (options, {option.name: option.from_environment() for option in _CREDENTIALS}):
        for option in _CREDENTIALS:
            if credential := source.get(option.name):
                return option.name, credential
    return None, ""


def _connection_parts(text: str) -> Mapping[str, str]:
    """Return the parts of a connection string by their names in lower case. Raises InvalidInputError."""
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part)
    by_name = {name.strip().lower(): value for name, value in parts.items()}
    has_credential = {"accountkey", "sharedaccesssignature"} & set(by_name)
    if not has_credential:
        raise InvalidInputError(
            "storage option 'connection_string' is not shown, as it holds credentials; it needs AccountKey=... or"
            " SharedAccessSignature=..., in parts with ';' between them"
        )
    return by_name


def _one_name(*names: str | None) -> str | None:
    given = {name for name in names if name is not None}
    if len(given) > 1:
        raise InvalidInputError(
            "the root and the storage options 'account_name' and 'connection_string' name more than one account: name"
            " one"
        )
    return next(iter(given), None)


def _endpoint_of(parts: Mapping[str, str], name: str) -> str:
    protocol = parts.get("defaultendpointsprotocol", "https")
    endpoint = parts.get("blobendpoint", f"{protocol}://{name}.blob.{parts.get('endpointsuffix', _PUBLIC_CLOUD)}")
    if not is_server_url(endpoint):
        raise InvalidInputError(
            "storage option 'connection_string' is not shown, as it holds credentials; its endpoint must be"
            " http://HOST[:PORT] or https://HOST[:PORT], without credentials"
        )
    return endpoint


def _check_key(key: str) -> None:
    try:
        base64.b64decode(key, validate=True)
    except ValueError:  # also where it is no ASCII
        raise InvalidInputError(
            "the key of the account is not shown: it is no text in base64 as Azure gives it; check 'account_key'"
        ) from None


def account_of_environment(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the account and the credential that the environment gives to a root with these options."""
    found: dict[str, str] = {}
    if not any(map(is_secret, options)):
        given = ((option.name, option.from_environment()) for option in _CREDENTIALS)
        found.update(next(([pair] for pair in given if pair[1]), []))
    account = _ACCOUNT_NAME.from_environment()
    if account and root.startswith("az://") and "connection_string" not in {*found, *options}:
        found["account_name"] = account
    return found
