"""The lakehouse resource: which options it takes, and that credentials never enter Dagster's configuration."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from pydantic import ValidationError

from tests.credentials.canaries import ACCESS_KEY_ID, RIGHT, SECRET_ACCESS_KEY, SESSION_TOKEN, leaks
from tests.dagster_plugin.quiet import QUIET
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
SECRETS = sorted(filter(is_secret, OPTIONS))


def test_every_option_has_its_place_in_the_configuration() -> None:
    named = {f"{scheme.name}.{option.name}" for scheme in OWN_SCHEMES.values() for option in scheme.options}
    names = OPTIONS | named | {option.name for option in COMMON_OPTIONS}
    assert SecretVariables.names() == set(filter(is_secret, names))
    assert StorageSettings.names() == names - SecretVariables.names()


def test_dagster_shows_what_an_option_is_for_and_what_it_accepts() -> None:
    fields = StorageSettings.to_config_schema().as_field().config_type.fields  # type: ignore[attr-defined]
    assert "s3://: " in fields["client"].description and "az://: " in fields["client"].description
    assert "azure-storage-blob" not in fields["s3.client"].description
    for scheme in OWN_SCHEMES.values():
        for option in scheme.options:
            if not option.is_secret:
                description = fields[f"{scheme.name}.{option.name}"].description
                assert option.help in description and option.accepted in description


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("fsync", "false", "no"),
        ("s3.client", "obstore", "azure-storage-blob"),
        ("client", "azure-storage-blob", "boto3"),
        ("redis.durability", "waitaof", "never"),
        ("read_timeout_seconds", "2.5", "soon"),
        ("hdfs.replication", "3", "1.5"),
        ("cache_bytes", "0", "-1"),
        ("gs.endpoint", "http://host:1", "http://host:1/path"),
        ("endpoint", "http://host:1/path", "ftp://host"),
    ],
)
def test_values_are_checked_when_definitions_load(name: str, right: str, wrong: str) -> None:
    assert StorageSettings(**{name: right}).explicit_options() == {name: right}
    with pytest.raises(InvalidInputError, match=f"'{name.rpartition('.')[2]}'"):
        StorageSettings(**{name: wrong})


def test_options_reach_the_lakehouse_and_stay_when_it_is_made_anew(tmp_path: Path) -> None:
    root = str(tmp_path / "lake")
    resource = TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="false"))
    assert resource.open_or_create().storage_options == {"fsync": "false"}
    assert resource.open().storage_options == {"fsync": "false"}
    with pytest.raises(InvalidInputError):
        TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="x")).open()


def test_roots_that_are_allowed_reach_the_lakehouse(tmp_path: Path) -> None:
    settings = StorageSettings(allowed_roots="s3://first/")
    roots = ["s3://second/x", "/third"]
    resource = TrinityLakeResource(root=str(tmp_path), storage_options=settings, allowed_roots=roots)
    lake = resource.open_or_create()
    assert lake.storage_options == {"allowed_roots": "s3://first/ s3://second/x /third"}
    assert lake.external_storages.allowed_roots.allowed == ("s3://first/", "s3://second/x/", "file:///third/")
    for wrong in ("s3://KEY:secret@bucket/", "s3://a/ s3://b/", "relative"):
        with pytest.raises(InvalidInputError, match="'allowed_roots'") as caught:
            TrinityLakeResource(root=str(tmp_path), allowed_roots=[wrong])
        assert wrong not in str(caught.value)


def test_credentials_come_from_named_variables_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = SecretVariables(access_key_id="MY_KEY", secret_access_key="MY_SECRET")
    resource = TrinityLakeResource(root="s3://bucket/lake", secret_options_from_env=variables)
    opened: list[tuple[str, Any]] = []
    monkeypatch.setattr(Lakehouse, "open", lambda *arguments: opened.append(arguments))
    with pytest.raises(InvalidInputError, match="'access_key_id'"):
        resource.open()
    monkeypatch.setenv("MY_KEY", ACCESS_KEY_ID)
    monkeypatch.setenv("MY_SECRET", SECRET_ACCESS_KEY)
    resource.open()
    assert opened == [("s3://bucket/lake", StorageOptions(RIGHT))]
    assert leaks(f"{resource!r} {resource} {resource.model_dump_json()} {opened}") == []


def test_options_of_other_roots_have_their_scheme_before_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", ACCESS_KEY_ID)
    monkeypatch.setenv("MY_SECRET", SECRET_ACCESS_KEY)
    shown = {"fsync": "false", "s3.endpoint": "https://host:9000", "redis.cluster": "true"}
    variables = {"s3.access_key_id": "MY_KEY", "s3.secret_access_key": "MY_SECRET"}
    resource = TrinityLakeResource(
        root=str(tmp_path),
        storage_options=StorageSettings(**shown),
        secret_options_from_env=SecretVariables(**variables),
    )
    hidden = {f"s3.{name}": value for name, value in RIGHT.items()}
    assert resource.open_or_create().storage_options == {**shown, **hidden}
    assert leaks(f"{resource!r} {resource.model_dump_json()}") == []


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (StorageSettings, {"s3.endpoint": f"https://user:{SECRET_ACCESS_KEY}@host"}, "'endpoint' must be"),
        (StorageSettings, {"s3.secret_access_key": SECRET_ACCESS_KEY}, "'s3.secret_access_key' is a credential"),
        (SecretVariables, {"s3.secret_access_key": SECRET_ACCESS_KEY}, "'s3.secret_access_key' is no name of an env"),
        (StorageSettings, {"gs.region": SECRET_ACCESS_KEY}, "unknown option 'gs.region'; .*, and each as SCHEME.NAME"),
        (StorageSettings, {"s3__region": SECRET_ACCESS_KEY}, "unknown option 's3__region'"),
    ],
)
def test_mistakes_among_options_of_other_roots_are_refused_unseen(
    make: Callable[..., object], given: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said) as caught:
        make(**given)
    assert leaks(everything_shown(caught.value)) == []


def test_options_of_other_roots_come_from_variables_and_from_the_launchpad(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StorageSettings(**{"s3.endpoint": dg.EnvVar("LAKE_ENDPOINT")})
    resource = TrinityLakeResource(root="memory://never-made/", storage_options=settings)
    monkeypatch.setenv("LAKE_ENDPOINT", f"https://user:{SECRET_ACCESS_KEY}@host")
    given = {"root": "memory://never-made/", "storage_options": {"s3.region": "here", "gs.project": "mine"}}
    with dg.instance_for_test() as instance:
        seen = failed_poll(instance, resource)
        assert "'endpoint' must be" in seen
        assert leaks(seen) == []
        monkeypatch.setenv("LAKE_ENDPOINT", "https://host")
        assert "there is no lakehouse at memory://never-made/" in failed_poll(instance, resource)
        assert "there is no lakehouse at memory://never-made/" in failed_poll(instance, resource, given)


def test_what_the_page_shows_is_the_same_by_code_and_by_yaml() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dagster" / "resource.md").read_text()
    section = page.partition("## Options of the storage")[2]
    code, written = (section.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "yaml"))
    by_code = eval(code)
    component = TrinityLakeMaintenanceComponent(**yaml.safe_load(written))
    assert component.settings().lakehouse == by_code
    assert by_code.storage_options.explicit_options()["s3.region"] == "eu-1"


@pytest.mark.parametrize("name", SECRETS)
def test_a_credential_among_the_options_is_refused_unseen(name: str) -> None:
    for value in (SECRET_ACCESS_KEY, dg.EnvVar("MY_SECRET")):
        with pytest.raises(InvalidInputError, match=f"'{name}' is a credential") as caught:
            TrinityLakeResource(root="s3://bucket/", storage_options={name: value, "region": "here"})  # type: ignore[arg-type]
        assert leaks(str(caught.value)) == []


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
def test_no_mistake_repeats_what_was_given(arguments: dict[str, Any]) -> None:
    with pytest.raises((InvalidInputError, ValidationError)) as caught:
        TrinityLakeResource(root="s3://bucket/", **arguments)
    assert leaks(f"{caught.value} {caught.value!r}") == []


def test_a_credential_given_instead_of_its_variable_is_not_repeated() -> None:
    variables = SecretVariables(access_key_id=ACCESS_KEY_ID)  # could be the name of a variable
    with pytest.raises(InvalidInputError) as caught:
        TrinityLakeResource(root="s3://bucket/", secret_options_from_env=variables).open()
    assert leaks(str(caught.value)) == []


def everything_shown(error: BaseException) -> str:
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
def test_a_root_that_is_none_is_refused_when_definitions_load(root: str) -> None:
    with pytest.raises(InvalidInputError, match="'root'") as caught:
        TrinityLakeResource(root=root)
    assert leaks(everything_shown(caught.value)) == []


@pytest.mark.parametrize(
    "root",
    [
        "s3://bucket", "s3://bucket/lake/", "gs://bucket/lake", "dynamodb://table/lake",
        "/folder", "file:///folder/", "memory://name/",
    ],
)  # fmt: skip
def test_roots_are_kept_as_they_are_given(root: str) -> None:
    assert TrinityLakeResource(root=root).root == root


@pytest.mark.parametrize("endpoint", [f"https://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@host", SECRET_ACCESS_KEY])
def test_an_endpoint_with_credentials_is_refused_when_definitions_load(endpoint: str) -> None:
    for make in (
        lambda: StorageSettings(endpoint=endpoint),
        lambda: TrinityLakeResource(root="s3://bucket/", storage_options={"endpoint": endpoint}),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInputError, match="'endpoint'") as caught:
            make()
        assert leaks(everything_shown(caught.value)) == []
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
def test_what_is_no_name_of_a_variable_is_refused_when_definitions_load(value: str) -> None:
    for name in SECRETS:
        with pytest.raises(InvalidInputError, match=f"'{name}' is no name of an environment variable") as caught:
            SecretVariables(**{name: value})
        shown = everything_shown(caught.value)
        assert leaks(shown) == []
        assert not value or value not in shown


def test_the_value_of_a_variable_is_not_taken_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_KEY", "nobody_may_see_this")
    with pytest.raises(InvalidInputError) as caught:
        SecretVariables(secret_access_key="nobody_may_see_this")
    assert "nobody_may_see_this" not in str(caught.value)
    monkeypatch.setenv("NAMED", "NAMED")
    assert SecretVariables(secret_access_key="NAMED").read() == {"secret_access_key": "NAMED"}


@pytest.mark.parametrize("name", ["_", "my_secret", "V" * 64, "S" * 40, "AKIA_OF_THE_LAKE", "mySecret2"])
def test_names_of_variables_are_accepted(name: str) -> None:
    assert SecretVariables(session_token=name).session_token == name


@dg.op
def look(lakehouse: TrinityLakeResource) -> None:
    lakehouse.open().latest_version()


@dg.job
def looking() -> None:
    """A job of a project, which has the resource's configuration in its launchpad; operations have not."""
    look()


def job_on(resource: TrinityLakeResource) -> dg.JobDefinition:
    return dg.Definitions(jobs=[looking], resources={"lakehouse": resource}).resolve_job_def("looking")


def failed_poll(
    instance: dg.DagsterInstance, resource: TrinityLakeResource, config: dict[str, Any] | None = None
) -> str:
    """Return everything that a run that opens the lakehouse logs, and how the resource is shown."""
    resources = {} if config is None else {"resources": {"lakehouse": {"config": config}}}
    result = job_on(resource).execute_in_process(
        instance=instance, raise_on_error=False, run_config={**resources, **QUIET}
    )
    assert not result.success
    return f"{resource!r} {instance.all_logs(result.run_id)}"


def test_variables_of_dagster_are_checked_when_a_run_resolves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StorageSettings(endpoint=dg.EnvVar("LAKE_ENDPOINT"))
    resource = TrinityLakeResource(root=dg.EnvVar("LAKE_ROOT"), storage_options=settings)
    monkeypatch.setenv("LAKE_ENDPOINT", "https://host")
    with dg.instance_for_test() as instance:
        monkeypatch.setenv("LAKE_ROOT", f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake")
        seen = failed_poll(instance, resource)
        assert "'root' is invalid" in seen
        assert leaks(seen) == []
        monkeypatch.setenv("LAKE_ROOT", "s3://bucket/lake")
        monkeypatch.setenv("LAKE_ENDPOINT", f"https://user:{SECRET_ACCESS_KEY}@host")
        seen = failed_poll(instance, resource)
        assert "'endpoint' must be" in seen
        assert leaks(seen) == []
        monkeypatch.setenv("LAKE_ROOT", "memory://never-made/")
        monkeypatch.setenv("LAKE_ENDPOINT", "https://host")
        assert "memory:// supports" in failed_poll(instance, resource), "the values reach the lakehouse"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"root": f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake"}, "'root' is invalid"),
        ({"storage_options": {"endpoint": f"https://user:{SECRET_ACCESS_KEY}@host"}}, "'endpoint' must be"),
        ({"secret_options_from_env": {"secret_access_key": SECRET_ACCESS_KEY}}, "is no name of an environment"),
    ],
)
def test_values_of_the_launchpad_are_refused_unseen(config: dict[str, Any], said: str) -> None:
    with dg.instance_for_test() as instance:
        seen = failed_poll(
            instance, TrinityLakeResource(root="memory://never-made/"), {"root": "memory://never-made/", **config}
        )
    assert said in seen
    assert leaks(seen) == []


@pytest.mark.parametrize("name", ["secret_access_key", "secret_key", "s3.secret_access_key"])
def test_the_launchpad_refuses_credentials_before_a_run_is_recorded(name: str) -> None:
    resource = TrinityLakeResource(root="memory://never-made/")
    given = {"root": "memory://never-made/", "storage_options": {name: SECRET_ACCESS_KEY}}
    with dg.instance_for_test() as instance:
        with pytest.raises(dg.DagsterInvalidConfigError, match=name) as caught:
            job_on(resource).execute_in_process(
                instance=instance, run_config={"resources": {"lakehouse": {"config": given}}, **QUIET}
            )
        assert instance.get_runs() == []
    assert leaks(str(caught.value)) == []


def test_options_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StorageSettings.from_environment().explicit_options() == {}
    monkeypatch.setenv(OPTIONS_VARIABLE, "endpoint=http://127.0.0.1:1,region=here")
    assert StorageSettings.from_environment().explicit_options() == {"endpoint": "http://127.0.0.1:1", "region": "here"}
    monkeypatch.setenv(OPTIONS_VARIABLE, f"region=here,secret_access_key={SECRET_ACCESS_KEY}")
    with pytest.raises(InvalidInputError) as caught:
        StorageSettings.from_environment()
    assert leaks(str(caught.value)) == []


@pytest.mark.parametrize("remote", ["spark://h:7077", f"sc://h:15002/;token={SECRET_ACCESS_KEY}"])
def test_a_remote_spark_is_checked_when_definitions_load(remote: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        SparkResource(remote=remote)
    assert not leaks(str(refused.value))
    assert SparkResource(remote="sc://h:15002").remote == "sc://h:15002"
