"""Resources: the lakehouse, also that of a branch, and the Spark session of a run.

Dagster+ sets variables in each branch deployment. Elsewhere one variable of ours says the same.
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

#: The name of the branch. It comes before what Dagster+ says.
BRANCH_VARIABLE = "TRINITYLAKE_BRANCH"

_IS_BRANCH_DEPLOYMENT = "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT"
_GIT_BRANCH = "DAGSTER_CLOUD_GIT_BRANCH"
_DEPLOYMENT = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
_LONGEST_BRANCH_CHARS = 1000
_SHOWN_CHARS = 60


def current_branch() -> str | None:
    """Return the branch of this process, None in production.

    Raises InvalidInputError for a branch deployment that does not say which it is, and for a name that is too long.
    """
    branch = os.environ.get(BRANCH_VARIABLE, "").strip()
    if not branch and os.environ.get(_IS_BRANCH_DEPLOYMENT, "").strip() == "1":
        branch = os.environ.get(_GIT_BRANCH, "").strip() or os.environ.get(_DEPLOYMENT, "").strip()
        if not branch:
            raise InvalidInputError(
                f"{_IS_BRANCH_DEPLOYMENT} is set, but neither {_GIT_BRANCH} nor {_DEPLOYMENT}: set {BRANCH_VARIABLE}"
                " to the name of the branch"
            )
    if len(branch) > _LONGEST_BRANCH_CHARS:
        raise InvalidInputError(f"the name of the branch has {len(branch)} characters, more than 1,000")
    return branch or None


def branch_clone(branch: str) -> str:
    """Return the name of the clone of a branch: what can be read of it, and a checksum that keeps branches apart."""
    shown = re.sub(r"[^a-z0-9]+", "-", branch.lower())[:_SHOWN_CHARS].strip("-")
    checksum = hashlib.sha256(branch.encode()).hexdigest()[:12]
    return f"{BRANCH_PREFIX}{shown}-{checksum}" if shown else f"{BRANCH_PREFIX}{checksum}"


def open_branch(root: str, parent_root: str, name: str, retain_ms: int, options: StorageOptions) -> Lakehouse:
    """Return the clone of a branch, which the first run makes.

    Raises LakehouseNotFoundError without a parent, ExportExistsError where the parent records the clone and its root
    vanished, InvalidInputError where another lakehouse stands there. Raises StorageError.
    """
    try:
        return _checked(Lakehouse.open(root, options), name)
    except LakehouseNotFoundError:
        pass
    parent = Lakehouse.open(parent_root, options)
    try:
        operations.plan_clone(parent, root, name, retain_for=retain_ms).execute()
    except (ExportExistsError, LakehouseExistsError) as error:  # another run made it first, or it vanished
        try:
            return _checked(Lakehouse.open(root, options), name)
        except LakehouseNotFoundError:
            raise error from None
    return _checked(Lakehouse.open(root, options), name)


def _checked(lake: Lakehouse, name: str) -> Lakehouse:
    parent = lake.snapshot().definition.parent
    if parent is None or parent.name != name:
        raise InvalidInputError(
            f"the lakehouse at {lake.root} is not the clone {name!r} of the branch; give branches a root of their own"
        )
    return lake


_WEB_ADDRESS = re.compile(r"https?://[A-Za-z0-9.\-]+(:\d{1,5})?(/[A-Za-z0-9._~/\-]*)?")


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

    clone_of: str | None = Field(
        default=None,
        description="Root of the lakehouse that is cloned to 'root' when a run finds no lakehouse there"
        " (for_branch_deployment sets it).",
    )
    clone_name: str = Field(default="", description="Name of that clone.")
    clone_retain_days: float = Field(default=14, gt=0, description="After how many days it is overdue.")
    webserver_url: str = Field(
        default="",
        description="Address of Dagster's webserver, such as https://dagster.example.com/prefix, for links in metadata."
        " Empty: links lead to the host of the page that shows them, which is right without a path prefix.",
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
        """Return the lakehouse at ``root`` in production, and a clone of it in the deployment of a branch.

        A process works for a branch if the environment says so: the variable TRINITYLAKE_BRANCH, or those that Dagster+
        sets in branch deployments. Each branch has a clone below ``clones_root``, which its first run makes, and which
        is overdue after ``retain_for``. Both roots may be EnvVars. That of ``clones_root`` is read here, when
        definitions load. ``settings`` are the other fields. Production may read below ``clones_root``, to compare and
        promote. Raises InvalidInputError for a branch without a name, and if no variable of ``clones_root`` is set.
        """
        branch = current_branch()
        clones = clones_root.get_value() if isinstance(clones_root, dg.EnvVar) else clones_root
        if not clones:
            raise InvalidInputError("the environment variable of clones_root is not set in this process")
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
    def _check_webserver_url(cls, given: Any) -> Any:
        if is_plain_text(given) and given and not _WEB_ADDRESS.fullmatch(given):
            raise InvalidInputError(
                "'webserver_url' is no address such as https://dagster.example.com/prefix, without credentials and"
                " without a query"
            )
        return given

    @field_validator("root", "clone_of", mode="before")
    @classmethod
    def _check_root(cls, given: Any) -> Any:
        if is_plain_text(given) and not is_root_uri(given):
            raise InvalidInputError(
                "'root' is not shown, as it may hold credentials; give an absolute path or a URI such as"
                " s3://BUCKET/PREFIX, without '.', '..' or empty segments; credentials and the server's address are"
                " set elsewhere"
            )
        return given

    @field_validator("allowed_roots", mode="before")
    @classmethod
    def _check_allowed_roots(cls, given: Any) -> Any:
        for root in given if isinstance(given, list) else []:
            if is_plain_text(root) and (not is_root_uri(root) or root.split() != [root]):
                raise InvalidInputError(
                    "one of 'allowed_roots' is not shown, as it may hold credentials; give absolute paths or URIs such"
                    " as s3://BUCKET/PREFIX, without white space, '.', '..' or empty segments"
                )
        return given

    def open(self) -> Lakehouse:
        """Return the lakehouse. In the deployment of a branch the first run makes it, as a clone.

        Raises LakehouseNotFoundError, and what a clone raises.
        """
        start_once()
        if self.clone_of is None:
            return Lakehouse.open(self.root, self._options())
        retain_ms = timedelta(days=self.clone_retain_days) // timedelta(milliseconds=1)
        return open_branch(self.root, self.clone_of, self.clone_name, retain_ms, self._options())

    def open_or_create(self) -> Lakehouse:
        """Return the lakehouse, a new one if there is none. That of a branch is a clone in any case."""
        if self.clone_of is not None:
            return self.open()
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
                    from trinitylake_ops.spark.executor import SparkExecutor
                resources = scope.enter_context(dg.build_resources({"spark": spark}))
                return SparkExecutor(resources.spark.session())

            yield executor

    def _options(self) -> StorageOptions:
        given = self.storage_options.explicit_options()
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
        if is_plain_text(given):
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
            from trinitylake_ops.spark import session_scope

            scope = session_scope("trinitylake-ops", self.master, remote=self.remote, **self.conf)
            self._session = self._scope.enter_context(scope)
        return self._session
