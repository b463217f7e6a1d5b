"""The command that serves lakehouses to any engine."""

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
    short_help="Serve lakehouses to any engine, by Iceberg's REST protocol.",
    epilog="""\b
Warehouses, which a client names when it connects:
  main                         the latest version; the only one that can be written
  v12                          version 12
  at-2026-11-01T00:00:00Z      the newest version at that time
  export-NAME                  the version that an export keeps
  clone-NAME                   the latest version of a clone
With --lakehouses, the name of the lakehouse and a dot stand before it: sales.main, sales.v12.

\b
A file of tokens (--tokens) has the SHA-256 of each token, never the token:
  tokens:
    - name: etl                  stands in the log, and in each commit
      sha256: 64 hexadecimal digits, from: printf %s "$TOKEN" | sha256sum
      scope: read                none, read, write or operate, for all namespaces
      namespaces: {sales: write} and for some
      expires: 2030-01-31T00:00:00Z

\b
More examples; the one above lets this machine read:
  trinitylake serve /data/lake --anonymous-writes   this machine may write
  trinitylake serve s3://bucket/lake --tokens tokens.yaml --host 0.0.0.0 --behind-proxy
  curl http://127.0.0.1:8181/v1/config?warehouse=v12

\b
Paths: /v1/config and those that it lists, /healthz, /readyz, /metrics, and / with the state of the lakehouses as a
page. The log is one JSON object a line, on standard error. SIGTERM and Ctrl-C let begun requests finish.""",
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
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=WholeNumber(0, 65_535), default=8181, show_default=True, help="The port; 0 is any.")
@click.option("--tokens", type=_FILE, metavar="FILE", help="Who may do what, in YAML. Read again when it changes.")
@click.option("--issuers", type=_FILE, metavar="FILE", help="Whose signed tokens (OIDC) are taken, in YAML.")
@click.option(
    "--traces", is_flag=True, help="Send spans and numbers by OpenTelemetry, as OTEL_... say. Needs the extra 'otel'."
)
@click.option("--anonymous-writes", is_flag=True, help="Let every program on this machine write. For loopback only.")
@click.option("--tls-certificate", type=_FILE, metavar="FILE", help="A certificate, with its chain, in PEM.")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="The key of the certificate, in PEM.")
@click.option("--behind-proxy", is_flag=True, help="A proxy in front has TLS, so tokens come in clear text.")
@click.option("--vend-role", default="", metavar="ARN", help="Give clients sessions of this role for a table's files.")
@click.option(
    "--vend-seconds", type=WholeNumber(900, 43_200), default=3_600, show_default=True, help="How long a session lasts."
)
@click.option(
    "--sts-endpoint", default="", metavar="URL", help="Where sessions and tokens come from.  [default: as the storage]"
)
@click.option(
    "--vend-downscoped", is_flag=True, help="Give clients downscoped tokens for a table's files, on Google's storage."
)
@click.option(
    "--vend-create-only",
    is_flag=True,
    help="Sessions of the role overwrite no file. Needs a storage and clients with If-None-Match.",
)
@click.option("--sign-requests", is_flag=True, help="Sign requests of clients for a table's files one by one.")
@click.option("--max-body-bytes", type=WholeNumber(1_024), metavar="N", help="The largest body.  [default: 16 MiB]")
@click.option(
    "--max-seconds", type=Number(0, 86_400, min_open=True), metavar="N", help="The longest request.  [default: 300]"
)
@click.option(
    "--threads", type=WholeNumber(1, 1_000), metavar="N", help="Reads, and changes, that run at a time.  [default: 32]"
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
    **chosen: Any,
) -> None:
    """Serve the lakehouse at ROOT, or several, to any engine that speaks Iceberg's REST protocol.

    Any number of servers may serve one lakehouse: none of them keeps anything. Without --tokens only programs on this
    machine are answered, and they may only read. docs/rest-catalog/run.md shows how engines connect.

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
        raise click.UsageError("give ROOT or --lakehouses, not both")
    if lakehouses is not None and allowed_roots:
        raise click.UsageError("with --lakehouses, write 'allowed_roots' of each lakehouse instead of --allow-root")
    of_files = ("vend_role", "vend_seconds", "sts_endpoint", "sign_requests", "vend_downscoped", "vend_create_only")
    if chosen["vend_create_only"] and not chosen["vend_role"]:
        raise click.UsageError("--vend-create-only needs --vend-role")
    files = DelegationSettings(*map(chosen.pop, of_files))
    if lakehouses is not None and files.is_on:
        raise click.UsageError("with --lakehouses, say under 'files' of each lakehouse what its clients get")
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
    settings = ServerSettings(served, limits=limits, **chosen)
    settings.check()
    log_as_json(redact_assignments)
    with contextlib.ExitStack() as at_end:
        if traces:
            with needs("otel"):
                from trinitylake_ops.telemetry.otel import send
            at_end.callback(send())
        run_server(settings)
