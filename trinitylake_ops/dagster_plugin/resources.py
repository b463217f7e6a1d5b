"""Dagster resources for a lakehouse, including the clone of a branch deployment, and for the Spark session of a run.

Dagster+ sets environment variables in each branch deployment. Other deployments set ``TRINITYLAKE_BRANCH``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr, field_validator

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.storage_settings import SecretVariables, StorageSettings, is_plain_text
from trinitylake_ops.declarations.options import BRANCH_PREFIX, is_root_uri
from trinitylake_ops.errors import ExportExistsError, InvalidInputError, LakehouseExistsError, LakehouseNotFoundError
from trinitylake_ops.extras import needs
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.spark.runtime.addresses import DEFAULT_MASTER, check_remote
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions
from trinitylake_ops.telemetry.settings import start_once

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Environment variable with the branch name. It takes precedence over the variables of Dagster+.
BRANCH_VARIABLE = "TRINITYLAKE_BRANCH"

_IS_BRANCH_DEPLOYMENT = "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT"
_GIT_BRANCH = "DAGSTER_CLOUD_GIT_BRANCH"
_DEPLOYMENT = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
_MAX_BRANCH_CHARS = 1000
_SHOWN_CHARS = 60


def current_branch() -> str | None:
    """Return the branch that this process works for, or None in production.

    Raises:
        InvalidInputError: A branch deployment does not name its branch, or the name is too long.
    """
    branch = os.environ.get(BRANCH_VARIABLE, "").strip()
    if not branch and os.environ.get(_IS_BRANCH_DEPLOYMENT, "").strip() == "1":
        branch = os.environ.get(_GIT_BRANCH, "").strip() or os.environ.get(_DEPLOYMENT, "").strip()
        if not branch:
            raise InvalidInputError(
                f"cannot determine the branch: {_IS_BRANCH_DEPLOYMENT} is set, but neither {_GIT_BRANCH} nor"
                f" {_DEPLOYMENT} is; set {BRANCH_VARIABLE} to the name of the branch"
            )
    if len(branch) > _MAX_BRANCH_CHARS:
        raise InvalidInputError(f"the branch name has {len(branch)} characters; at most 1,000 are allowed")
    return branch or None


def branch_clone(branch: str) -> str:
    """Return the name of a branch's clone: a readable slug, and a checksum that makes it unique."""
    slug = re.sub(r"[^a-z0-9]+", "-", branch.lower())[:_SHOWN_CHARS].strip("-")
    checksum = hashlib.sha256(branch.encode()).hexdigest()[:12]
    return f"{BRANCH_PREFIX}{slug}-{checksum}" if slug else f"{BRANCH_PREFIX}{checksum}"


def open_branch(root: str, parent_root: str, name: str, retain_ms: int, options: StorageOptions) -> Lakehouse:
    """Open the clone of a branch, and create it if it does not exist.

    Args:
        root: The root of the clone.
        parent_root: The root of the lakehouse to clone.
        name: The name of the clone.
        retain_ms: Time after which the clone is overdue.
        options: The storage options of both lakehouses.

    Raises:
        LakehouseNotFoundError: The parent does not exist.
        ExportExistsError: The parent records the clone, but the clone's root was deleted.
        InvalidInputError: The root contains another lakehouse.
        StorageError: A storage request failed.
    """
    try:
        return _checked(Lakehouse.open(root, options), name)
    except LakehouseNotFoundError:
        pass
    parent = Lakehouse.open(parent_root, options)
    try:
        operations.plan_clone(parent, root, name, retain_for=retain_ms).execute()
    except (ExportExistsError, LakehouseExistsError) as error:  # another run won the race, or the clone was deleted
        try:
            return _checked(Lakehouse.open(root, options), name)
        except LakehouseNotFoundError:
            raise error from None
    return _checked(Lakehouse.open(root, options), name)


def _checked(lake: Lakehouse, name: str) -> Lakehouse:
    parent = lake.snapshot().definition.parent
    if parent is None or parent.name != name:
        raise InvalidInputError(
            f"the lakehouse at {lake.root} is not the clone {name!r} of the branch; use a separate root for the clones"
            " of branches"
        )
    return lake


_WEB_ADDRESS = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d{1,5})?(/[A-Za-z0-9._~/\-]*)?")


class TrinityLakeResource(dg.ConfigurableResource["TrinityLakeResource"]):
    """A lakehouse, identified by its root URI. It contains no secrets, because Dagster displays its configuration."""

    model_config = ConfigDict(hide_input_in_errors=True)

    root: str = Field(
        description="Root URI of the lakehouse, for example s3://bucket/lake, or an absolute directory path."
    )
    storage_options: StorageSettings = Field(default=StorageSettings(), description="Storage options.")
    secret_options_from_env: SecretVariables = Field(
        default=SecretVariables(),
        description="Names of the environment variables that hold credentials. Only needed if the storage client cannot"
        " find credentials itself, for example in AWS_ACCESS_KEY_ID or from an instance role.",
    )
    allowed_roots: list[str] = Field(
        default=[],
        description="Further roots that may be read, and below which external tables may be written, for example"
        " those of registered tables.",
    )
    isolation: Literal["lakehouse", "snapshot", "serializable"] = Field(
        default="lakehouse",
        description="Isolation level of transactions that publish tables; 'lakehouse' uses the lakehouse's default.",
    )
    engine: Literal["local", "spark"] = Field(
        default="local",
        description="Where the bulk of expire, purge, orphans, export and verify executes: 'local' uses threads in the"
        " process of the run, 'spark' uses tasks of the code location's Spark session.",
    )

    clone_of: str | None = Field(
        default=None,
        description="Root of the lakehouse to clone to 'root' if no lakehouse exists there. Set by"
        " for_branch_deployment.",
    )
    clone_name: str = Field(default="", description="Name of the clone.")
    clone_retain_days: float = Field(default=14, gt=0, description="Days after which the clone is overdue.")
    webserver_url: str = Field(
        default="",
        description="URL of Dagster's webserver, for example https://dagster.example.com/prefix, for links in metadata."
        " If empty, links are relative to the current host, which works unless the webserver has a path prefix.",
    )

    @classmethod
    def for_branch_deployment(
        cls,
        root: str,
        clones_root: str,
        *,
        retain_for: timedelta = timedelta(days=14),
        allowed_roots: tuple[str, ...] = (),
        **settings: Any,
    ) -> Self:
        """Return the lakehouse at ``root`` in production, or a clone of it in a branch deployment.

        A process belongs to a branch if the environment variable TRINITYLAKE_BRANCH is set, or the variables that
        Dagster+ sets in branch deployments. The first run of a branch creates its clone.

        Args:
            root: The root of the production lakehouse. May be an EnvVar.
            clones_root: The root below which clones are created. May be an EnvVar, which is read when definitions load.
                Production may read below this root, to compare and promote branches.
            retain_for: Time after which a clone is overdue.
            allowed_roots: Further roots that may be read and written.
            settings: Values of the other fields.

        Raises:
            InvalidInputError: A branch deployment does not name its branch, or the variable of ``clones_root`` is not
                set.
        """
        branch = current_branch()
        clones = clones_root.get_value() if isinstance(clones_root, dg.EnvVar) else clones_root
        if not clones:
            raise InvalidInputError(
                "clones_root has no value: its environment variable is not set in this process; set the variable"
            )
        if branch is None:
            return cls(root=root, allowed_roots=[*allowed_roots, clones], **settings)
        name = branch_clone(branch)
        return cls(
            root=f"{clones.rstrip('/')}/{name}/",
            clone_of=root,
            clone_name=name,
            clone_retain_days=retain_for / timedelta(days=1),
            allowed_roots=[*allowed_roots],
            **settings,
        )

    @property
    def is_branch(self) -> bool:
        """Whether this is the clone of a branch."""
        return self.clone_of is not None

    @field_validator("webserver_url", mode="before")
    @classmethod
    def _check_webserver_url(cls, url: Any) -> Any:
        if is_plain_text(url) and url and not _WEB_ADDRESS.fullmatch(url):
            raise InvalidInputError(
                "'webserver_url' is invalid; use a URL such as https://dagster.example.com/prefix, without credentials"
                " and without a query"
            )
        return url

    @field_validator("root", "clone_of", mode="before")
    @classmethod
    def _check_root(cls, root: Any) -> Any:
        if is_plain_text(root) and not is_root_uri(root):
            raise InvalidInputError(
                "'root' is invalid (its value is not shown because it may contain credentials); use an absolute path or"
                " a URI such as s3://BUCKET/PREFIX, without '.', '..' or empty segments, and without credentials and"
                " the server's address, which have their own settings"
            )
        return root

    @field_validator("allowed_roots", mode="before")
    @classmethod
    def _check_allowed_roots(cls, roots: Any) -> Any:
        for root in roots if isinstance(roots, list) else []:
            if is_plain_text(root) and (not is_root_uri(root) or root.split() != [root]):
                raise InvalidInputError(
                    "one of 'allowed_roots' is invalid (its value is not shown because it may contain credentials); use"
                    " absolute paths or URIs such as s3://BUCKET/PREFIX, without whitespace, '.', '..' or empty"
                    " segments"
                )
        return roots

    def open(self) -> Lakehouse:
        """Open the lakehouse. In a branch deployment, create it as a clone if it does not exist.

        Raises:
            LakehouseNotFoundError: The lakehouse, or the lakehouse to clone, does not exist.
            TrinityLakeError: The clone cannot be created; see :func:`open_branch`.
        """
        start_once()
        if self.clone_of is None:
            return Lakehouse.open(self.root, self._options())
        retain_ms = timedelta(days=self.clone_retain_days) // timedelta(milliseconds=1)
        return open_branch(self.root, self.clone_of, self.clone_name, retain_ms, self._options())

    def open_or_create(self) -> Lakehouse:
        """Open the lakehouse, and create it if it does not exist. In a branch deployment it is always a clone."""
        if self.clone_of is not None:
            return self.open()
        with contextlib.suppress(LakehouseNotFoundError):
            return self.open()
        with contextlib.suppress(LakehouseExistsError):  # another run won the race
            return Lakehouse.create(self.root, self._options())
        return self.open()

    @contextlib.contextmanager
    def executors(self, spark: SparkResource) -> Iterator[Callable[[], Executor]]:
        """Provide a function that returns the engine's executor.

        The function starts the Spark session on its first call. The session stops when the context exits.
        """
        with contextlib.ExitStack() as scope:

            @functools.cache
            def executor() -> Executor:
                if self.engine == "local":
                    return LOCAL
                with needs("spark"):
                    from trinitylake_ops.spark.executor import SparkExecutor
                resources = scope.enter_context(dg.build_resources({"spark": spark}))
                return SparkExecutor(resources.spark.session())

            yield executor

    def _options(self) -> StorageOptions:
        options = self.storage_options.explicit_options()
        if roots := [*options.get(ALLOWED_ROOTS, "").split(), *self.allowed_roots]:
            options[ALLOWED_ROOTS] = " ".join(roots)
        return StorageOptions({**options, **self.secret_options_from_env.read()})


def lakehouse_of(resources: object, names: LakehouseNames) -> TrinityLakeResource:
    """Return a lakehouse's resource from the ``context.resources`` of a definition that requires it."""
    resource = getattr(resources, names.resource_key)
    assert isinstance(resource, TrinityLakeResource)
    return resource


class SparkResource(dg.ConfigurableResource["SparkResource"]):
    """A Spark session that is started on first use and stopped when Dagster tears down the resource."""

    master: str = Field(default=DEFAULT_MASTER, description="Spark master URL.")
    remote: str | None = Field(
        default=None,
        description="Spark Connect server to use instead of master, for example sc://host:15002. Its token is read from"
        " the environment variable SPARK_CONNECT_AUTHENTICATE_TOKEN.",
    )
    conf: dict[str, str] = Field(default={}, description="Further Spark settings by name.")

    @field_validator("remote", mode="before")
    @classmethod
    def _check_remote(cls, url: Any) -> Any:
        if is_plain_text(url):
            check_remote(url)
        return url

    _session: SparkSession | None = PrivateAttr(default=None)
    _scope: contextlib.ExitStack = PrivateAttr(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[SparkResource]:
        """Stop the session when Dagster tears down the resource."""
        with self._scope:
            yield self
        self._session = None

    def session(self) -> SparkSession:
        """Return the session, and start it on the first call.

        Raises:
            MissingExtraError: Spark is not installed.
            JavaNotFoundError: Java is not installed.
            InvalidInputError: The remote server is invalid.
            JobFailedError: The remote server cannot be used.
        """
        if self._session is None:
            # Imported here because a code location that never uses Spark need not have it installed.
            from trinitylake_ops.spark import session_scope

            scope = session_scope("trinitylake-ops", self.master, remote=self.remote, **self.conf)
            self._session = self._scope.enter_context(scope)
        return self._session
