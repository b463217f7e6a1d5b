"""The account of a root: where its Blob service is, and by which credentials it is asked."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.azure.settings import ACCOUNT, AzureLocation, AzureSettings
from trinitylake_ops.storage.options import StorageOptions, is_secret
from trinitylake_ops.storage.remote.settings import check_endpoint

_ACCOUNT_VARIABLE = "AZURE_STORAGE_ACCOUNT_NAME"
_PUBLIC_CLOUD = "core.windows.net"
#: Where credentials that are not options may stand, in the order in which they are looked for.
_CREDENTIALS = {
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
}


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
        name = name or os.environ.get(_ACCOUNT_VARIABLE)
        if name is None or not ACCOUNT.fullmatch(name):
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
    for places in (options, {kind: os.environ.get(variable) for kind, variable in _CREDENTIALS.items()}):
        for kind in _CREDENTIALS:
            if credential := places.get(kind):
                return kind, credential
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
    if "blobendpoint" in parts:
        check_endpoint(parts["blobendpoint"])
        return parts["blobendpoint"]
    protocol = parts.get("defaultendpointsprotocol", "https")
    endpoint = f"{protocol}://{name}.blob.{parts.get('endpointsuffix', _PUBLIC_CLOUD)}"
    check_endpoint(endpoint)
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
        given = ((name, os.environ.get(variable, "")) for name, variable in _CREDENTIALS.items())
        found.update(next(([one] for one in given if one[1]), []))
    account = os.environ.get(_ACCOUNT_VARIABLE)
    if account and root.startswith("az://") and "connection_string" not in {*found, *options}:
        found["account_name"] = account
    return found
