"""Test the options of the lakehouse resource, and that Dagster's configuration never contains credentials."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from pydantic import ValidationError

from tests.credentials.canaries import ACCESS_KEY_ID, SECRET_ACCESS_KEY, SESSION_TOKEN, VALID_CREDENTIALS, leaks
from tests.dagster_plugin.run_config import QUIET
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import TrinityLakeMaintenanceComponent
from trinitylake_ops.dagster_plugin.resources import (
    SecretVariables,
    SparkResource,
    StorageSettings,
    TrinityLakeResource,
)
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.options import COMMON_OPTIONS, OPTIONS_VARIABLE, StorageOptions, is_secret
from trinitylake_ops.storage.registry import OWN_SCHEMES

OPTIONS = {option.name for scheme in OWN_SCHEMES.values() for option in scheme.options}
SECRET_OPTIONS = sorted(filter(is_secret, OPTIONS))


def test_configuration_has_field_for_each_storage_option() -> None:
    scheme_options = {f"{scheme.name}.{option.name}" for scheme in OWN_SCHEMES.values() for option in scheme.options}
    names = OPTIONS | scheme_options | {option.name for option in COMMON_OPTIONS}
    assert SecretVariables.names() == set(filter(is_secret, names))
    assert StorageSettings.names() == names - SecretVariables.names()


def test_configuration_fields_have_description_and_type() -> None:
    fields = StorageSettings.to_config_schema().as_field().config_type.fields  # type: ignore[attr-defined]
    assert "s3://, dynamodb://: " in fields["endpoint"].description and "gs://: " in fields["endpoint"].description
    assert "Blob service" not in fields["s3.endpoint"].description
    for scheme in OWN_SCHEMES.values():
        for option in scheme.options:
            if not option.is_secret:
                description = fields[f"{scheme.name}.{option.name}"].description
                assert option.help in description and option.accepted in description


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("fsync", "false", "no"),
        ("s3.client", "obstore", "boto3"),
        ("client", "s3fs", "boto3"),
        ("redis.durability", "waitaof", "never"),
        ("read_timeout_seconds", "2.5", "soon"),
        ("hdfs.replication", "3", "1.5"),
        ("cache_bytes", "0", "-1"),
        ("gs.endpoint", "http://host:1", "http://host:1/path"),
        ("endpoint", "http://host:1/path", "ftp://host"),
    ],
)
def test_option_values_are_checked_when_definitions_load(name: str, valid: str, invalid: str) -> None:
    assert StorageSettings(**{name: valid}).explicit_options() == {name: valid}
    with pytest.raises(InvalidInputError, match=f"'{name.rpartition('.')[2]}'"):
        StorageSettings(**{name: invalid})


def test_options_reach_lakehouse_and_survive_copy_of_resource(tmp_path: Path) -> None:
    root = str(tmp_path / "lake")
    resource = TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="false"))
    assert resource.open_or_create().storage_options == {"fsync": "false"}
    assert resource.open().storage_options == {"fsync": "false"}
    with pytest.raises(InvalidInputError):
        TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="x")).open()


def test_allowed_roots_reach_lakehouse(tmp_path: Path) -> None:
    settings = StorageSettings(allowed_roots="s3://first/")
    roots = ["s3://second/x", "/third"]
    resource = TrinityLakeResource(root=str(tmp_path), storage_options=settings, allowed_roots=roots)
    lake = resource.open_or_create()
    assert lake.storage_options == {"allowed_roots": "s3://first/ s3://second/x /third"}
    assert lake.external_storages.allowed_roots.allowed == ("s3://first/", "s3://second/x/", "file:///third/")
    for invalid in ("s3://KEY:secret@bucket/", "s3://a/ s3://b/", "relative"):
        with pytest.raises(InvalidInputError, match="'allowed_roots'") as raised:
            TrinityLakeResource(root=str(tmp_path), allowed_roots=[invalid])
        assert invalid not in str(raised.value)


def test_credentials_are_read_from_environment_when_lakehouse_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = SecretVariables(access_key_id="MY_KEY", secret_access_key="MY_SECRET")
    resource = TrinityLakeResource(root="s3://bucket/lake", secret_options_from_env=variables)
    open_calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(Lakehouse, "open", lambda *arguments: open_calls.append(arguments))
    with pytest.raises(InvalidInputError, match="'access_key_id'"):
        resource.open()
    monkeypatch.setenv("MY_KEY", ACCESS_KEY_ID)
    monkeypatch.setenv("MY_SECRET", SECRET_ACCESS_KEY)
    resource.open()
    assert open_calls == [("s3://bucket/lake", StorageOptions(VALID_CREDENTIALS))]
    assert leaks(f"{resource!r} {resource} {resource.model_dump_json()} {open_calls}") == []


def test_options_of_other_schemes_have_scheme_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", ACCESS_KEY_ID)
    monkeypatch.setenv("MY_SECRET", SECRET_ACCESS_KEY)
    options = {"fsync": "false", "s3.endpoint": "https://host:9000", "redis.cluster": "true"}
    variables = {"s3.access_key_id": "MY_KEY", "s3.secret_access_key": "MY_SECRET"}
    resource = TrinityLakeResource(
        root=str(tmp_path),
        storage_options=StorageSettings(**options),
        secret_options_from_env=SecretVariables(**variables),
    )
    secrets = {f"s3.{name}": value for name, value in VALID_CREDENTIALS.items()}
    assert resource.open_or_create().storage_options == {**options, **secrets}
    assert leaks(f"{resource!r} {resource.model_dump_json()}") == []


@pytest.mark.parametrize(
    ("build", "config", "message"),
    [
        (StorageSettings, {"s3.endpoint": f"https://user:{SECRET_ACCESS_KEY}@host"}, "'endpoint' must be"),
        (StorageSettings, {"s3.secret_access_key": SECRET_ACCESS_KEY}, "'s3.secret_access_key' is a credential"),
        (SecretVariables, {"s3.secret_access_key": SECRET_ACCESS_KEY}, "is not the name of an environment"),
        (StorageSettings, {"gs.region": SECRET_ACCESS_KEY}, "unknown option 'gs.region'; .*, and each as SCHEME.NAME"),
        (StorageSettings, {"s3__region": SECRET_ACCESS_KEY}, "unknown option 's3__region'"),
    ],
)
def test_invalid_options_of_other_schemes_are_rejected_without_their_values(
    build: Callable[..., object], config: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message) as raised:
        build(**config)
    assert leaks(displayed_text(raised.value)) == []


def test_options_of_other_schemes_are_read_from_environment_and_launchpad(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StorageSettings(**{"s3.endpoint": dg.EnvVar("LAKE_ENDPOINT")})
    resource = TrinityLakeResource(root="memory://missing/", storage_options=settings)
    monkeypatch.setenv("LAKE_ENDPOINT", f"https://user:{SECRET_ACCESS_KEY}@host")
    config = {"root": "memory://missing/", "storage_options": {"s3.region": "here", "gs.project": "mine"}}
    with dg.instance_for_test() as instance:
        output = failed_run_output(instance, resource)
        assert "'endpoint' must be" in output
        assert leaks(output) == []
        monkeypatch.setenv("LAKE_ENDPOINT", "https://host")
        assert "there is no lakehouse at memory://missing/" in failed_run_output(instance, resource)
        assert "there is no lakehouse at memory://missing/" in failed_run_output(instance, resource, config)


def test_documented_options_are_equal_in_code_and_yaml() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dagster" / "resource.md").read_text()
    section = page.partition("## Options of the storage")[2]
    python_code, yaml_text = (section.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "yaml"))
    python_resource = eval(python_code)
    component = TrinityLakeMaintenanceComponent(**yaml.safe_load(yaml_text))
    assert component.settings().lakehouse == python_resource
    assert python_resource.storage_options.explicit_options()["s3.region"] == "eu-1"


@pytest.mark.parametrize("name", SECRET_OPTIONS)
def test_credential_in_options_is_rejected_without_its_value(name: str) -> None:
    for value in (SECRET_ACCESS_KEY, dg.EnvVar("MY_SECRET")):
        with pytest.raises(InvalidInputError, match=f"'{name}' is a credential") as raised:
            TrinityLakeResource(root="s3://bucket/", storage_options={name: value, "region": "here"})  # type: ignore[arg-type]
        assert leaks(str(raised.value)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"storage_options": {"secret_key": SECRET_ACCESS_KEY}},
        {"storage_options": {SECRET_ACCESS_KEY: "secret_access_key"}},
        {"storage_options": SECRET_ACCESS_KEY},
        {"storage_options": [SECRET_ACCESS_KEY]},
        {"storage_options": {"region": [SECRET_ACCESS_KEY]}},
        {"secret_options_from_env": {"secret": SECRET_ACCESS_KEY}},
        {"secret_options_from_env": SECRET_ACCESS_KEY},
        {"secret_options_from_env": {"session_token": [SESSION_TOKEN]}},
        {"isolation": SESSION_TOKEN},
    ],
)
def test_error_messages_do_not_repeat_values(arguments: dict[str, Any]) -> None:
    with pytest.raises((InvalidInputError, ValidationError)) as raised:
        TrinityLakeResource(root="s3://bucket/", **arguments)
    assert leaks(f"{raised.value} {raised.value!r}") == []


def test_credential_in_place_of_variable_name_is_not_repeated() -> None:
    variables = SecretVariables(access_key_id=ACCESS_KEY_ID)  # could be the name of a variable
    with pytest.raises(InvalidInputError) as raised:
        TrinityLakeResource(root="s3://bucket/", secret_options_from_env=variables).open()
    assert leaks(str(raised.value)) == []


def displayed_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize(
    "root",
    [
        f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake",
        f"s3://{ACCESS_KEY_ID}:/{SECRET_ACCESS_KEY}@bucket/lake",
        f"s3://{ACCESS_KEY_ID}@bucket/lake",
        f"https://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@host/bucket",
        f"/folder/../{SECRET_ACCESS_KEY}",
        SECRET_ACCESS_KEY,
        f"dynamodb://{ACCESS_KEY_ID}@table/lake",
        "dynamodb://host:8000/table/lake",
        "s3://host:9000/bucket/lake",
        "s3://bucket//lake",
        "lake",
        "",
        f"gs://{SECRET_ACCESS_KEY}/lake",
    ],
)
def test_invalid_root_is_rejected_when_definitions_load(root: str) -> None:
    with pytest.raises(InvalidInputError, match="'root'") as raised:
        TrinityLakeResource(root=root)
    assert leaks(displayed_text(raised.value)) == []


@pytest.mark.parametrize(
    "root",
    [
        "s3://bucket", "s3://bucket/lake/", "gs://bucket/lake", "dynamodb://table/lake",
        "/folder", "file:///folder/", "memory://name/",
    ],
)  # fmt: skip
def test_valid_root_is_not_modified(root: str) -> None:
    assert TrinityLakeResource(root=root).root == root


@pytest.mark.parametrize("endpoint", [f"https://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@host", SECRET_ACCESS_KEY])
def test_endpoint_with_credentials_is_rejected_when_definitions_load(endpoint: str) -> None:
    for build in (
        lambda: StorageSettings(endpoint=endpoint),
        lambda: TrinityLakeResource(root="s3://bucket/", storage_options={"endpoint": endpoint}),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInputError, match="'endpoint'") as raised:
            build()
        assert leaks(displayed_text(raised.value)) == []
    assert StorageSettings(endpoint="https://host:9000").explicit_options() == {"endpoint": "https://host:9000"}


@pytest.mark.parametrize(
    "value",
    [
        SECRET_ACCESS_KEY,
        SESSION_TOKEN,
        "LeakCanarySecret0Of0The0Tests01234567890",
        "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE",
        "V" * 65,
        "1_VARIABLE",
        "MY-SECRET",
        "MY_SECRET\n",
        "",
    ],
)
def test_invalid_variable_name_is_rejected_when_definitions_load(value: str) -> None:
    for name in SECRET_OPTIONS:
        with pytest.raises(InvalidInputError, match=f"'{name}' in secret_options_from_env is not the name") as raised:
            SecretVariables(**{name: value})
        text = displayed_text(raised.value)
        assert leaks(text) == []
        assert not value or value not in text


def test_value_of_variable_is_not_accepted_as_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_KEY", "value_of_the_variable")
    with pytest.raises(InvalidInputError) as raised:
        SecretVariables(secret_access_key="value_of_the_variable")
    assert "value_of_the_variable" not in str(raised.value)
    monkeypatch.setenv("SAME_NAME", "SAME_NAME")
    assert SecretVariables(secret_access_key="SAME_NAME").read() == {"secret_access_key": "SAME_NAME"}


@pytest.mark.parametrize("name", ["_", "my_secret", "V" * 64, "S" * 40, "AKIA_OF_THE_LAKE", "mySecret2"])
def test_valid_variable_names_are_accepted(name: str) -> None:
    assert SecretVariables(session_token=name).session_token == name


@dg.op
def open_lakehouse(lakehouse: TrinityLakeResource) -> None:
    lakehouse.open().latest_version()


@dg.job
def open_job() -> None:
    """A job of a user project. Unlike that of an operation job, its launchpad accepts configuration of the resource."""
    open_lakehouse()


def job_with_resource(resource: TrinityLakeResource) -> dg.JobDefinition:
    return dg.Definitions(jobs=[open_job], resources={"lakehouse": resource}).resolve_job_def("open_job")


def failed_run_output(
    instance: dg.DagsterInstance, resource: TrinityLakeResource, config: dict[str, Any] | None = None
) -> str:
    """Open the lakehouse in a run that fails. Return the representation of the resource and the log of the run."""
    resources = {} if config is None else {"resources": {"lakehouse": {"config": config}}}
    result = job_with_resource(resource).execute_in_process(
        instance=instance, raise_on_error=False, run_config={**resources, **QUIET}
    )
    assert not result.success
    return f"{resource!r} {instance.all_logs(result.run_id)}"


def test_env_var_values_are_checked_when_run_resolves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StorageSettings(endpoint=dg.EnvVar("LAKE_ENDPOINT"))
    resource = TrinityLakeResource(root=dg.EnvVar("LAKE_ROOT"), storage_options=settings)
    monkeypatch.setenv("LAKE_ENDPOINT", "https://host")
    with dg.instance_for_test() as instance:
        monkeypatch.setenv("LAKE_ROOT", f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake")
        output = failed_run_output(instance, resource)
        assert "'root' is invalid" in output
        assert leaks(output) == []
        monkeypatch.setenv("LAKE_ROOT", "s3://bucket/lake")
        monkeypatch.setenv("LAKE_ENDPOINT", f"https://user:{SECRET_ACCESS_KEY}@host")
        output = failed_run_output(instance, resource)
        assert "'endpoint' must be" in output
        assert leaks(output) == []
        monkeypatch.setenv("LAKE_ROOT", "memory://missing/")
        monkeypatch.setenv("LAKE_ENDPOINT", "https://host")
        assert "memory:// supports" in failed_run_output(instance, resource), "the lakehouse must receive the values"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"root": f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake"}, "'root' is invalid"),
        ({"storage_options": {"endpoint": f"https://user:{SECRET_ACCESS_KEY}@host"}}, "'endpoint' must be"),
        ({"secret_options_from_env": {"secret_access_key": SECRET_ACCESS_KEY}}, "is not the name of an environment"),
    ],
)
def test_invalid_launchpad_values_are_rejected_without_their_values(config: dict[str, Any], message: str) -> None:
    with dg.instance_for_test() as instance:
        output = failed_run_output(
            instance, TrinityLakeResource(root="memory://missing/"), {"root": "memory://missing/", **config}
        )
    assert message in output
    assert leaks(output) == []


@pytest.mark.parametrize("name", ["secret_access_key", "secret_key", "s3.secret_access_key"])
def test_launchpad_rejects_credentials_before_run_is_recorded(name: str) -> None:
    resource = TrinityLakeResource(root="memory://missing/")
    config = {"root": "memory://missing/", "storage_options": {name: SECRET_ACCESS_KEY}}
    with dg.instance_for_test() as instance:
        with pytest.raises(dg.DagsterInvalidConfigError, match=name) as raised:
            job_with_resource(resource).execute_in_process(
                instance=instance, run_config={"resources": {"lakehouse": {"config": config}}, **QUIET}
            )
        assert instance.get_runs() == []
    assert leaks(str(raised.value)) == []


def test_options_are_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StorageSettings.from_environment().explicit_options() == {}
    monkeypatch.setenv(OPTIONS_VARIABLE, "endpoint=http://127.0.0.1:1,region=here")
    assert StorageSettings.from_environment().explicit_options() == {"endpoint": "http://127.0.0.1:1", "region": "here"}
    monkeypatch.setenv(OPTIONS_VARIABLE, f"region=here,secret_access_key={SECRET_ACCESS_KEY}")
    with pytest.raises(InvalidInputError) as raised:
        StorageSettings.from_environment()
    assert leaks(str(raised.value)) == []


@pytest.mark.parametrize("remote", ["spark://h:7077", f"sc://h:15002/;token={SECRET_ACCESS_KEY}"])
def test_invalid_spark_connect_url_is_rejected_when_definitions_load(remote: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        SparkResource(remote=remote)
    assert not leaks(str(raised.value))
    assert SparkResource(remote="sc://h:15002").remote == "sc://h:15002"
