"""Options of storages as Dagster's configuration has them: those that anybody may see, and variables with the rest.

An option has one field for roots of the lakehouse's own scheme, ``endpoint``, and one for those of each scheme that
takes it, ``s3.endpoint``. Dagster knows all their names, so it refuses others before a run exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import dagster as dg
from pydantic import ConfigDict, Field, ValidationInfo, create_model, field_validator, model_validator

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.http.settings import check_endpoint
from trinitylake_ops.storage.options import OPTIONS_VARIABLE, StorageOptions, is_secret
from trinitylake_ops.storage.registry import OWN_SCHEMES

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_ACCESS_KEY_ID = re.compile(r"(AKIA|ASIA)[A-Z0-9]{16}")
_SECRET_KEY_LENGTH = 40
#: What stands for the dot of an option in the name of its field.
_BETWEEN = "__"


def is_plain_text(given: Any) -> TypeGuard[str]:
    """Whether a field was given a value itself. The value of an EnvVar comes here when a run resolves it."""
    return isinstance(given, str) and not isinstance(given, dg.EnvVar)


def _is_variable_name(given: str) -> bool:
    """Whether this is a variable's name, and not a credential of AWS or a variable's value."""
    is_like_secret_key = len(given) == _SECRET_KEY_LENGTH and given not in (given.lower(), given.upper())
    # a template put the value there, "{{ env.NAME }}"
    is_value = given not in os.environ and given in os.environ.values()
    return bool(_VARIABLE_NAME.fullmatch(given)) and not (
        _ACCESS_KEY_ID.fullmatch(given) or is_like_secret_key or is_value
    )


class _OptionsConfig(dg.Config):
    """Options by their names, which Dagster's configuration schema knows. Others are refused before a run exists."""

    # Only the classes that are used build their validators, and only when they are used.
    model_config = ConfigDict(hide_input_in_errors=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_names(cls, given: Any) -> Any:
        # Pydantic's own error would repeat the value, which may be a credential.
        names = sorted(set(given) - cls.names()) if isinstance(given, Mapping) else []
        if secret := next(filter(is_secret, names), None):
            raise InvalidInputError(
                f"{secret!r} is a credential and Dagster shows configuration: leave it to the environment of the"
                " process, or name its environment variable in secret_options_from_env"
            )
        if names:
            # refuses a text that does not look like a name, and does not show it
            StorageOptions(dict.fromkeys(names, ""))
            plain = ", ".join(name for name in cls.model_fields if _BETWEEN not in name)
            raise InvalidInputError(f"unknown option {names[0]!r}; there are {plain}, and each as SCHEME.NAME")
        return given

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all options."""
        return set(map(_name_of, cls.model_fields))

    def explicit_options(self) -> dict[str, str]:
        """Return the options that were set."""
        return self.model_dump(by_alias=True, exclude_none=True)

    def of_scheme(self, scheme: str, name: str) -> Any:
        """Return what was set as an option of one scheme: under its name with the scheme, else without."""
        return getattr(self, f"{scheme}{_BETWEEN}{name}", None) or getattr(self, name)


def _name_of(field: str) -> str:
    """Return the name of the option of a field, whose own name must be a word of Python."""
    return field.replace(_BETWEEN, ".")


def _for_schemes(plain: type[_OptionsConfig]) -> Any:
    """Return a class with the fields of another one, and with one for each scheme that takes such an option."""
    fields: dict[str, Any] = {
        f"{scheme.name}{_BETWEEN}{name}": (
            str | None,
            Field(
                default=None,
                alias=f"{scheme.name}.{name}",
                description=f"The option {name!r} of {scheme.name}:// roots, also where the lakehouse is elsewhere.",
            ),
        )
        for scheme in OWN_SCHEMES.values()
        for name in plain.model_fields
        if name in scheme.options
    }
    return create_model(f"{plain.__name__}ForSchemes", __base__=plain, __module__=__name__, **fields)


class _PlainSettings(_OptionsConfig):
    """The options without a scheme."""

    fsync: str | None = Field(default=None, description="Local folders, HDFS: 'true' or 'false'.")
    follow_links: str | None = Field(
        default=None, description="Local folders: 'false' refuses symbolic links below the root."
    )
    endpoint: str | None = Field(
        default=None, description="S3, Azure, Google Cloud Storage, DynamoDB: URL of another server."
    )
    region: str | None = Field(default=None, description="S3, DynamoDB: region of the bucket or table.")
    client: str | None = Field(
        default=None, description="S3: 's3fs' or 'obstore'. Azure: 'azure-storage-blob' or 'obstore'."
    )
    account_name: str | None = Field(default=None, description="Azure: the account, where the root names none.")
    addressing_style: str | None = Field(default=None, description="S3: 'auto', 'path' or 'virtual'.")
    connect_timeout_seconds: str | None = Field(default=None, description="Servers: seconds until a connection stands.")
    read_timeout_seconds: str | None = Field(default=None, description="Servers: seconds without a byte of an answer.")
    project: str | None = Field(default=None, description="Google Cloud Storage: project that pays for requests.")
    create_table: str | None = Field(
        default=None, description="DynamoDB: 'true' lets the first create make a table that is missing."
    )
    username: str | None = Field(default=None, description="Redis: user of its ACL, with a password.")
    durability: str | None = Field(default=None, description="Redis: 'always', 'waitaof', 'everysec' or 'assured'.")
    volatile: str | None = Field(default=None, description="Redis: 'true' accepts a server that may lose all.")
    wait_replicas: str | None = Field(default=None, description="Redis: replicas that confirm each write.")
    cluster: str | None = Field(default=None, description="Redis: 'true' for a cluster.")
    tls_ca_file: str | None = Field(default=None, description="Redis: file of certificates that are trusted.")
    tls_client_pem_file: str | None = Field(default=None, description="Redis: file of our certificate and its key.")
    namenodes: str | None = Field(
        default=None, description="HDFS: HOST:PORT of each NameNode of a name service, with spaces between them."
    )
    replication: str | None = Field(default=None, description="HDFS: how many DataNodes keep each new file.")
    whole_file_limit_bytes: str | None = Field(
        default=None, description="The most bytes of a node or definition; 256 MiB by default, which is the least."
    )
    cache_bytes: str | None = Field(default=None, description="Memory for immutable files, in bytes.")
    cache_folder: str | None = Field(default=None, description="Local folder for immutable files.")
    cache_folder_bytes: str | None = Field(default=None, description="Size of that folder, in bytes.")

    allowed_roots: str | None = Field(
        default=None,
        description="Further roots that may be read, and where tables of others may be written, such as those of"
        " registered tables; URIs with spaces between them.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_endpoint(cls, given: Any, info: ValidationInfo) -> Any:
        if _name_of(info.field_name or "").rpartition(".")[2] == "endpoint" and is_plain_text(given):
            check_endpoint(given)
        return given


if TYPE_CHECKING:
    _Settings = _PlainSettings
else:
    _Settings = _for_schemes(_PlainSettings)


class StorageSettings(_Settings):
    """Options of storages that anybody may see. Each storage takes some of them (docs/storage.md)."""

    @classmethod
    def from_environment(cls) -> StorageSettings:
        """Return the options in TRINITYLAKE_STORAGE_OPTIONS, ``K=V,K=V``. Raises InvalidInputError, without values."""
        return cls(**StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, "")))


class _PlainVariables(_OptionsConfig):
    """The options without a scheme."""

    access_key_id: str | None = Field(default=None, description="Name of the variable that holds the access key id.")
    secret_access_key: str | None = Field(default=None, description="Name of the variable that holds the secret key.")
    session_token: str | None = Field(default=None, description="Name of the variable that holds the session token.")
    credentials: str | None = Field(
        default=None, description="Name of the variable that holds credentials of Google Cloud: a file's path or text."
    )
    password: str | None = Field(default=None, description="Name of the variable that holds the password (Redis).")
    account_key: str | None = Field(
        default=None, description="Name of the variable that holds the key of an account on Azure."
    )
    sas_token: str | None = Field(
        default=None, description="Name of the variable that holds a shared access signature on Azure."
    )
    connection_string: str | None = Field(
        default=None, description="Name of the variable that holds the connection string of an account on Azure."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_variable(cls, given: Any, info: ValidationInfo) -> Any:
        if is_plain_text(given) and not _is_variable_name(given):
            name = _name_of(info.field_name or "")
            raise InvalidInputError(
                f"what secret_options_from_env has for {name!r} is no name of an environment variable;"
                " give the variable's name there, not the credential itself"
            )
        return given


if TYPE_CHECKING:
    _Variables = _PlainVariables
else:
    _Variables = _for_schemes(_PlainVariables)


class SecretVariables(_Variables):
    """Environment variables with options that nobody may see. The process that needs them reads them."""

    def read(self) -> dict[str, str]:
        """Return the credentials. Raises InvalidInputError, which repeats neither value nor variable."""
        found: dict[str, str] = {}
        for name, variable in self.explicit_options().items():
            if variable not in os.environ:
                raise InvalidInputError(
                    f"the environment variable that secret_options_from_env names for {name!r} is not set in this"
                    " process; give the variable's name there, not the credential itself"
                )
            found[name] = os.environ[variable]
        return found
