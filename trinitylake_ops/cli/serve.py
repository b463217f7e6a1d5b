"""The command that serves lakehouses over the Iceberg REST protocol."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import click

from trinitylake_ops.cli.context import Number, Session, WholeNumber, pass_session, with_allowed_roots
from trinitylake_ops.extras import needs
from trinitylake_ops.storage.options import redact_assignments
from trinitylake_ops.telemetry.settings import log_as_json

_FILE = click.Path(path_type=Path)


@click.command(
    short_help="Serve lakehouses over the Iceberg REST protocol.",
    epilog="""\b
Warehouses, which a client selects when it connects:
  main                         the latest version; the only writable one
  v12                          version 12
  at-2026-11-01T00:00:00Z      the newest version at that time
  export-NAME                  the version that an export keeps
  clone-NAME                   the latest version of a clone
With --lakehouses, the name of the lakehouse and a dot are put in front: sales.main, sales.v12.

\b
A token file (--tokens) contains the SHA-256 of each token, never the token itself:
  tokens:
    - name: etl                  appears in the log and in each commit
      sha256: 64 hexadecimal digits, from: printf %s "$TOKEN" | sha256sum
      scope: read                none, read, write or operate, for all namespaces
      namespaces: {sales: write} for single namespaces
      expires: 2030-01-31T00:00:00Z

\b
More examples; the one above lets clients on this machine read:
  trinitylake serve /data/lake --anonymous-writes   clients on this machine may write
  trinitylake serve s3://bucket/lake --tokens tokens.yaml --host 0.0.0.0 --behind-proxy
  curl http://127.0.0.1:8181/v1/config?warehouse=v12

\b
Paths: /v1/config and the endpoints that it lists, /healthz, /readyz, /metrics, and / with an HTML report of the
lakehouses. Logs are JSON lines on standard error. On SIGTERM and Ctrl-C, running requests finish first.""",
)
@click.argument("root", required=False)
@click.option("--lakehouses", type=_FILE, metavar="FILE", help="Several lakehouses by name, in YAML, instead of ROOT.")
@click.option(
    "--allow-root",
    "allowed_roots",
    multiple=True,
    metavar="URI",
    help="Also allow access to files below this root, for example of registered tables. Repeatable. With --lakehouses,"
    " write allowed_roots of each lakehouse instead.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=WholeNumber(0, 65_535), default=8181, show_default=True, help="The port; 0 for any free one."
)
@click.option("--tokens", type=_FILE, metavar="FILE", help="Tokens and their rights, in YAML. Reloaded on change.")
@click.option("--issuers", type=_FILE, metavar="FILE", help="Trusted issuers of signed tokens (OIDC), in YAML.")
@click.option(
    "--traces", is_flag=True, help="Send traces and metrics with OpenTelemetry, set by OTEL_... Needs the extra 'otel'."
)
@click.option("--anonymous-writes", is_flag=True, help="Let all programs on this machine write. Loopback only.")
@click.option("--tls-certificate", type=_FILE, metavar="FILE", help="The certificate with its chain, in PEM format.")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="The key of the certificate, in PEM format.")
@click.option("--behind-proxy", is_flag=True, help="Accept tokens in clear text, because a proxy terminates TLS.")
@click.option("--vend-role", default="", metavar="ARN", help="Vend sessions of this role for the files of a table.")
@click.option(
    "--vend-seconds", type=WholeNumber(900, 43_200), default=3_600, show_default=True, help="The duration of a session."
)
@click.option(
    "--sts-endpoint", default="", metavar="URL", help="The STS endpoint of sessions.  [default: the storage's]"
)
@click.option(
    "--vend-downscoped", is_flag=True, help="Vend downscoped tokens for the files of a table, on Google Cloud Storage."
)
@click.option(
    "--vend-create-only",
    is_flag=True,
    help="Sessions of the role cannot overwrite files. The storage and the clients must support If-None-Match.",
)
@click.option("--sign-requests", is_flag=True, help="Sign single requests of clients for the files of a table.")
@click.option("--max-body-bytes", type=WholeNumber(1_024), metavar="N", help="Maximum body size.  [default: 16 MiB]")
@click.option(
    "--max-seconds", type=Number(0, 86_400, min_open=True), metavar="N", help="Time limit of a request.  [default: 300]"
)
@click.option(
    "--threads", type=WholeNumber(1, 1_000), metavar="N", help="Maximum concurrent reads, and changes.  [default: 32]"
)
@pass_session
def serve(
    session: Session,
    /,
    root: str | None,
    lakehouses: Path | None,
    allowed_roots: tuple[str, ...],
    max_body_bytes: int | None,
    max_seconds: float | None,
    threads: int | None,
    traces: bool,
    **settings_by_name: Any,
) -> None:
    """Serve the lakehouse at ROOT, or several, over the Iceberg REST protocol.

    Servers are stateless, so any number of them may serve one lakehouse. Without --tokens, only programs on this
    machine are served, and they may only read. docs/rest-catalog/run.md shows how to connect engines.

    Example: trinitylake serve /data/lake
    """
    with needs("server"):
        from trinitylake_ops.server.run import serve as run_server
        from trinitylake_ops.server.settings import (
            ONLY,
            LakehouseSettings,
            Limits,
            ServerSettings,
            read_lakehouses,
        )
        from trinitylake_ops.storage.delegation import DelegationSettings

    if lakehouses is not None and root is not None:
        raise click.UsageError("pass either ROOT or --lakehouses, not both")
    if lakehouses is not None and allowed_roots:
        raise click.UsageError("--allow-root does not apply to --lakehouses; set allowed_roots of each lakehouse")
    of_files = ("vend_role", "vend_seconds", "sts_endpoint", "sign_requests", "vend_downscoped", "vend_create_only")
    if settings_by_name["vend_create_only"] and not settings_by_name["vend_role"]:
        raise click.UsageError("--vend-create-only needs --vend-role")
    files = DelegationSettings(*map(settings_by_name.pop, of_files))
    if lakehouses is not None and files.is_on:
        raise click.UsageError("options of --vend-... do not apply to --lakehouses; set 'files' of each lakehouse")
    if lakehouses is not None:
        served = read_lakehouses(lakehouses)
    else:
        options = with_allowed_roots(session.storage_options, allowed_roots)
        served = {ONLY: LakehouseSettings(session.root if root is None else root, options, files)}
    default = Limits()
    limits = dataclasses.replace(
        default,
        body_bytes=max_body_bytes or default.body_bytes,
        seconds=max_seconds or default.seconds,
        threads=threads or default.threads,
    )
    settings = ServerSettings(served, limits=limits, **settings_by_name)
    settings.check()
    log_as_json(redact_assignments)
    with contextlib.ExitStack() as at_end:
        if traces:
            with needs("otel"):
                from trinitylake_ops.telemetry.otel import send
            at_end.callback(send())
        run_server(settings)
