"""Resources: the lakehouse, and the Spark session of a run."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.errors import InvalidInputError, InvalidLocationError, LakehouseExistsError, LakehouseNotFoundError
from trinitylake_ops.extras import needs
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.maintenance.plans.executor import LOCAL, Executor
from trinitylake_ops.spark_jobs.runtime.addresses import DEFAULT_MASTER, check_remote
from trinitylake_ops.storage.options import ALLOWED_ROOTS, OPTIONS_VARIABLE, StorageOptions, is_secret
from trinitylake_ops.storage.remote.settings import check_endpoint
from trinitylake_ops.storage.schemes import check_root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_ACCESS_KEY_ID = re.compile(r"(AKIA|ASIA)[A-Z0-9]{16}")
_SECRET_KEY_LENGTH = 40


def _is_plain_text(given: Any) -> TypeGuard[str]:
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


def is_root_uri(given: str) -> bool:
    """Whether this can be the root of a lakehouse: one with credentials cannot."""
    try:
        root = normalize_root_uri(given)
        check_root(root)
    except InvalidLocationError:
        return False
    return True


class _OptionsConfig(dg.Config):
    """Options by their names, which Dagster's configuration schema knows. Others are refused before a run exists."""

    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_names(cls, given: Any) -> Any:
        # Pydantic's own error would repeat the value, which may be a credential.
        names = sorted(set(given) - set(cls.model_fields)) if isinstance(given, Mapping) else []
        if secret := next(filter(is_secret, names), None):
            raise InvalidInputError(
                f"{secret!r} is a credential and Dagster shows configuration: leave it to the environment of the"
                " process, or name its environment variable in secret_options_from_env"
            )
        if names:
            # refuses a text that does not look like a name, and does not show it
            StorageOptions(dict.fromkeys(names, ""))
            raise InvalidInputError(f"unknown option {names[0]!r}; there are {', '.join(cls.model_fields)}")
        return given

    def given(self) -> dict[str, str]:
        """Return the options that were set."""
        return self.model_dump(exclude_none=True)


class StorageSettings(_OptionsConfig):
    """Options of storages that anybody may see. Each storage takes some of them (docs/storage.md)."""

    fsync: str | None = Field(default=None, description="Local folders, HDFS: 'true' or 'false'.")
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

    @field_validator("endpoint", mode="before")
    @classmethod
    def _check_endpoint(cls, given: Any) -> Any:
        if _is_plain_text(given):
            check_endpoint(given)
        return given

    @classmethod
    def from_environment(cls) -> StorageSettings:
        """Return the options in TRINITYLAKE_STORAGE_OPTIONS, ``K=V,K=V``. Raises InvalidInputError, without values."""
        return cls(**StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, "")))


class SecretVariables(_OptionsConfig):
    """Environment variables with options that nobody may see. The process that needs them reads them."""

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
        if _is_plain_text(given) and not _is_variable_name(given):
            raise InvalidInputError(
                f"what secret_options_from_env has for {info.field_name!r} is no name of an environment variable;"
                " give the variable's name there, not the credential itself"
            )
        return given

    def read(self) -> dict[str, str]:
        """Return the credentials. Raises InvalidInputError, which repeats neither value nor variable."""
        found: dict[str, str] = {}
        for name, variable in self.given().items():
            if variable not in os.environ:
                raise InvalidInputError(
                    f"the environment variable that secret_options_from_env names for {name!r} is not set in this"
                    " process; give the variable's name there, not the credential itself"
                )
            found[name] = os.environ[variable]
        return found


class TrinityLakeResource(dg.ConfigurableResource["TrinityLakeResource"]):
    """A lakehouse by its root URI. It holds no secret: Dagster shows it."""

    model_config = ConfigDict(hide_input_in_errors=True)

    root: str = Field(
        description="Root URI of the lakehouse, such as s3://bucket/lake, or the absolute path of a folder."
    )
    storage_options: StorageSettings = Field(default=StorageSettings(), description="Options of the storage.")
    secret_options_from_env: SecretVariables = Field(
        default=SecretVariables(),
        description="Names of environment variables that hold credentials; only when they are not where the storage's"
        " client looks by itself, such as AWS_ACCESS_KEY_ID or a role of the machine.",
    )
    allowed_roots: list[str] = Field(
        default=[],
        description="Further roots that may be read, and where tables of others may be written, such as those of"
        " registered tables.",
    )
    isolation: Literal["lakehouse", "snapshot", "serializable"] = Field(
        default="lakehouse",
        description="Isolation of the transactions that publish tables; 'lakehouse' is the lakehouse's own level.",
    )
    engine: Literal["local", "spark"] = Field(
        default="local",
        description="What carries out the bulk of expire, purge, orphans, export and verify. 'local' means threads of"
        " the process of the run; 'spark' means tasks of the Spark that the code location has.",
    )

    @field_validator("root", mode="before")
    @classmethod
    def _check_root(cls, given: Any) -> Any:
        if _is_plain_text(given) and not is_root_uri(given):
            raise InvalidInputError(
                "'root' is not shown, as it may hold credentials: give an absolute path or a URI such as"
                " s3://BUCKET/PREFIX, without '.', '..' or empty segments; credentials and the server's address are"
                " set elsewhere"
            )
        return given

    @field_validator("allowed_roots", mode="before")
    @classmethod
    def _check_allowed_roots(cls, given: Any) -> Any:
        for root in given if isinstance(given, list) else []:
            if _is_plain_text(root) and (not is_root_uri(root) or root.split() != [root]):
                raise InvalidInputError(
                    "one of 'allowed_roots' is not shown, as it may hold credentials: give absolute paths or URIs such"
                    " as s3://BUCKET/PREFIX, without white space, '.', '..' or empty segments"
                )
        return given

    def open(self) -> Lakehouse:
        """Return the lakehouse. Raises LakehouseNotFoundError."""
        return Lakehouse.open(self.root, self._options())

    def open_or_create(self) -> Lakehouse:
        """Return the lakehouse, a new one if there is none."""
        with contextlib.suppress(LakehouseNotFoundError):
            return self.open()
        with contextlib.suppress(LakehouseExistsError):  # another run created it first
            return Lakehouse.create(self.root, self._options())
        return self.open()

    @contextlib.contextmanager
    def executors(self, spark: SparkResource) -> Iterator[Callable[[], Executor]]:
        """Provide a function that returns the engine's executor.

        A session starts when it is called, and ends with this block.
        """
        with contextlib.ExitStack() as scope:

            @functools.cache
            def executor() -> Executor:
                if self.engine == "local":
                    return LOCAL
                with needs("spark"):
                    from trinitylake_ops.spark_jobs.executor import SparkExecutor
                resources = scope.enter_context(dg.build_resources({"spark": spark}))
                return SparkExecutor(resources.spark.session())

            yield executor

    def _options(self) -> StorageOptions:
        given = self.storage_options.given()
        if roots := [*given.get(ALLOWED_ROOTS, "").split(), *self.allowed_roots]:
            given[ALLOWED_ROOTS] = " ".join(roots)
        return StorageOptions({**given, **self.secret_options_from_env.read()})


def lakehouse_of(resources: object, names: LakehouseNames) -> TrinityLakeResource:
    """Return the resource of a lakehouse from ``context.resources`` of a definition that requires it."""
    resource = getattr(resources, names.resource_key)
    assert isinstance(resource, TrinityLakeResource)
    return resource


class SparkResource(dg.ConfigurableResource["SparkResource"]):
    """One Spark session for the steps of a run. It starts when the first step asks, and stops with the run."""

    master: str = Field(default=DEFAULT_MASTER, description="Spark master URL.")
    remote: str | None = Field(
        default=None,
        description="Server of Spark Connect instead, such as sc://host:15002; its token comes from the variable"
        " SPARK_CONNECT_AUTHENTICATE_TOKEN.",
    )
    conf: dict[str, str] = Field(default={}, description="Further Spark settings by name.")

    @field_validator("remote", mode="before")
    @classmethod
    def _check_remote(cls, given: Any) -> Any:
        if _is_plain_text(given):
            check_remote(given)
        return given

    _session: SparkSession | None = PrivateAttr(default=None)
    _scope: contextlib.ExitStack = PrivateAttr(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[SparkResource]:
        """Keep the session for as long as Dagster keeps the resource."""
        with self._scope:
            yield self
        self._session = None

    def session(self) -> SparkSession:
        """Return the session.

        Raises MissingExtraError without Spark, JavaNotFoundError; with a remote InvalidInputError, JobFailedError.
        """
        if self._session is None:
            # A code location that starts no Spark need not have it.
            from trinitylake_ops.spark_jobs import session_scope

            scope = session_scope("trinitylake-ops", self.master, remote=self.remote, **self.conf)
            self._session = self._scope.enter_context(scope)
        return self._session
