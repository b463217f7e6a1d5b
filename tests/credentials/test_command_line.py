"""Every command in a separate process, with valid and invalid credentials."""

from __future__ import annotations

import pytest

from tests.cli.forked import Result, run
from tests.cli.test_processes import assert_one_line
from tests.cli.test_processes import run as run_program
from tests.credentials.canaries import ACCESS_KEY_ID, SECRET_ACCESS_KEY, SESSION_TOKEN, WRONG_SECRET_ACCESS_KEY, leaks
from tests.credentials.server import CanaryServer
from tests.operations.changes import append_rows, create, expire
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake

pytestmark = pytest.mark.debian_packages

#: Placeholder for the root of a clone, which is created next to the lakehouse.
CLONE = "the root of the clone"
#: Every command, with arguments for the lakehouse of :func:`server_with_lake`. Commands with effects run in this order.
CALLS: dict[str, tuple[str, ...]] = {
    "init": ("init",),
    "undelete": ("undelete", "0"),
    "create-namespace": ("create-namespace", "more", "--property", "owner=me"),
    "register-table": ("register-table", "ns.ext", "copy.metadata.json"),
    "export": ("export", "kept", "--version", "1"),
    "exports": ("exports", "--json"),
    "clones": ("clones", "--json"),
    "status": ("status", "--json"),
    "policy": ("policy", "show"),
    "maintain": ("maintain", "--dry-run"),
    "space": ("space",),
    "log": ("log",),
    "ls": ("ls", "ns"),
    "show": ("show", "ns.t", "--json"),
    "head": ("head", "ns.t"),
    "count": ("count", "ns.t", "--json"),
    "diff": ("diff", "0", "2"),
    "repair-hint": ("repair-hint",),
    "verify": ("verify",),
    "resolve-commit": ("resolve-commit", "1", "00000000-0000-0000-0000-000000000000"),
    "clone": ("clone", CLONE, "--name", "feature"),
    "compare": ("compare", "feature", "--json"),
    "promote": ("promote", "feature", "--yes"),
    "refresh": ("refresh", "feature", "--yes"),
    "drop-clone": ("drop-clone", "feature", "--delete-files", "--yes"),
    "verify-export": ("verify-export", "kept", "--deep"),
    "restore": ("restore", "kept"),
    "prune-exports": ("prune-exports", "kept*", "--keep-last", "1"),
    "repair": ("repair",),
    "drop-export": ("drop-export", "kept", "--yes"),
    "tree": ("tree",),
    "compact": ("compact",),
    "compact-tables": ("compact-tables", "ns.t", "--yes"),
    "trim": ("trim", "ns.t", "--yes"),
    "relocate": ("relocate", "--yes"),
    "expire": ("expire", "--max-age", "1h", "--json"),
    "purge": ("purge", "--max-requests", "5", "--yes"),
    "orphans": ("orphans",),
    "reconcile": ("reconcile",),
    "rollback": ("rollback", "1", "--yes"),
    "drop-namespace": ("drop-namespace", "ns", "--cascade", "--yes"),
}


@pytest.fixture(scope="module")
def server_with_lake(canaries: CanaryServer) -> CanaryServer:
    lake = Lakehouse.create(canaries.root, canaries.options_with_credentials)
    create(lake, "ns")
    append_rows(lake)
    metadata_location = lake.snapshot().table("ns", "t").format_properties["metadata_location"]
    lake.storage.create("copy.metadata.json", lake.storage.read(metadata_location))
    expire(lake, "0")
    return canaries


def arguments_of(name: str, canaries: CanaryServer) -> list[str]:
    return [canaries.root.replace("/lake/", "/clone/") if argument == CLONE else argument for argument in CALLS[name]]


def assert_no_leaks(result: Result) -> None:
    assert leaks(result.out + result.err) == []


def test_list_of_commands_is_complete() -> None:
    assert {*CALLS, "serve", "completion"} == set(trinitylake.commands), (
        "'completion' uses no credentials, and tests/server covers 'serve'"
    )


def test_commands_hide_credentials_of_the_environment(server_with_lake: CanaryServer) -> None:
    for name in CALLS:
        result = run(*arguments_of(name, server_with_lake), **server_with_lake.environment)
        assert_no_leaks(result)
        expected = {"init": 3, "resolve-commit": 1}.get(name, 0)
        assert result.code == expected, (name, result)


def test_commands_hide_credentials_in_options(canaries: CanaryServer) -> None:
    credential_options = [
        part
        for name, value in canaries.options_with_credentials.items()
        for part in ("--storage-option", f"{name}={value}")
    ]
    root = canaries.root.replace("/lake/", "/other/")
    for arguments in (("init",), ("ls", "--json"), ("verify", "--json"), ("show", "--version", "7")):
        result = run("--root", root, *credential_options, *arguments)
        assert_no_leaks(result)
        assert result.code == (4 if "7" in arguments else 0), result


def test_second_process_with_wrong_secret_fails_despite_the_cache_folder(server_with_lake: CanaryServer) -> None:
    wrong_secret = {"AWS_SECRET_ACCESS_KEY": WRONG_SECRET_ACCESS_KEY}
    for environment, code in ((server_with_lake.environment, 0), ({**server_with_lake.environment, **wrong_secret}, 5)):
        result = run_program("log", **environment)
        assert_no_leaks(result)
        assert result.code == code, result


#: Commands that open the lakehouse in different ways. The other commands fail in the same way as one of them.
FAILING_COMMANDS = ("init", "ls", "export", "clone", "verify", "purge", "register-table")


@pytest.mark.parametrize(
    ("failure", "commands"),
    [
        ("wrong secret", FAILING_COMMANDS),
        pytest.param("wrong secret", tuple(CALLS), marks=pytest.mark.soak, id="wrong secret-all commands"),
        *((failure, ("ls",)) for failure in ("wrong key", "wrong bucket", "bucket of another user", "unreachable")),
    ],
)
def test_each_failure_is_one_line_without_credentials(
    server_with_lake: CanaryServer, failure: str, commands: tuple[str, ...]
) -> None:
    root, options = server_with_lake.failing_configurations()[failure]
    key, secret = options.pop("access_key_id"), options.pop("secret_access_key")
    environment = {
        **server_with_lake.environment,
        "TRINITYLAKE_ROOT": root,
        "TRINITYLAKE_STORAGE_OPTIONS": ",".join(f"{name}={value}" for name, value in options.items()),
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
    }
    for name in commands:
        result = run(*arguments_of(name, server_with_lake), **environment)
        assert_no_leaks(result)
        assert_one_line(result, 5, "")


def test_expired_session_is_reported_without_credentials(moto: S3Server) -> None:
    """Use moto, which accepts any credentials, so that every request contains a session token."""
    root = moto.fresh_root()
    environment = {
        "TRINITYLAKE_ROOT": root,
        "TRINITYLAKE_STORAGE_OPTIONS": f"endpoint={moto.endpoint},region={moto.region}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
    }
    for arguments in (("init",), ("create-namespace", "x"), ("ls", "--json"), ("show", "--version", "9")):
        assert_no_leaks(run(*arguments, **environment))
    moto.delete_all(root)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--storage-option", SECRET_ACCESS_KEY, "ls"),
        ("--storage-option", f"secret_access_key:{SECRET_ACCESS_KEY}", "ls"),
        ("--storage-option", "secret_access_key", SECRET_ACCESS_KEY, "ls"),
        ("--storage-option", f"access_key_id={ACCESS_KEY_ID}", f"secret_access_key={SECRET_ACCESS_KEY}", "ls"),
        ("--storage-option", f"secret={SECRET_ACCESS_KEY}", "ls"),
        ("--storage-option", f"{SECRET_ACCESS_KEY}=secret_access_key", "ls"),
        ("--storage-options", f"secret_access_key={SECRET_ACCESS_KEY}", "ls"),
        (f"--storage-options=secret_access_key={SECRET_ACCESS_KEY}", "ls"),
        ("--root", f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake", "ls"),
        ("--root", f"s3:/{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake", "ls"),
        ("--root", f"{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake", "ls"),
        ("--storage-option", f"endpoint=http://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@127.0.0.1:1", "ls"),
    ],
)
def test_mistyped_arguments_are_not_shown(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, TRINITYLAKE_ROOT="s3://bucket/lake")
    assert_no_leaks(result)
    assert_one_line(result, 2, "")


@pytest.mark.parametrize("text", [SECRET_ACCESS_KEY, f"a=b,{SECRET_ACCESS_KEY}", f"{SECRET_ACCESS_KEY}=x"])
def test_invalid_variable_is_not_shown(text: str) -> None:
    result = run("ls", TRINITYLAKE_ROOT="s3://bucket/lake", TRINITYLAKE_STORAGE_OPTIONS=text)
    assert_no_leaks(result)
    assert_one_line(result, 2, "")
