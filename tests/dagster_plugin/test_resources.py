"""The lakehouse resource: which options it takes, and that credentials never enter Dagster's configuration."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pydantic import ValidationError

from tests.credentials.canaries import ACCESS_KEY_ID, RIGHT, SECRET_ACCESS_KEY, SESSION_TOKEN, leaks
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.jobs import maintenance_definitions
from trinitylake_ops.dagster_plugin.resources import SecretVariables, StorageSettings, TrinityLakeResource
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.cache_options import CACHE_OPTIONS
from trinitylake_ops.storage.options import OPTIONS_VARIABLE, SECRET_OPTIONS, StorageOptions
from trinitylake_ops.storage.s3_settings import S3_OPTIONS

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


def test_every_option_has_its_place_in_the_configuration() -> None:
    assert set(StorageSettings.model_fields) == (S3_OPTIONS | CACHE_OPTIONS | {"fsync"}) - SECRET_OPTIONS
    assert set(SecretVariables.model_fields) == SECRET_OPTIONS


def test_options_reach_the_lakehouse_and_stay_when_it_is_made_anew(tmp_path: Path) -> None:
    root = str(tmp_path / "lake")
    resource = TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="false"))
    assert resource.open_or_create().storage_options == {"fsync": "false"}
    assert resource.open().storage_options == {"fsync": "false"}
    with pytest.raises(InvalidInputError, match="fsync"):
        TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="x")).open()


def test_credentials_come_from_named_variables_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = SecretVariables(access_key_id="MY_KEY", secret_access_key="MY_SECRET")
    resource = TrinityLakeResource(root="s3://bucket/lake", secret_options_from_env=variables)
    opened: list[tuple[str, Any]] = []
    monkeypatch.setattr(Lakehouse, "open", lambda *arguments: opened.append(arguments))
    with pytest.raises(InvalidInputError, match="'access_key_id' is not set in this process"):
        resource.open()
    monkeypatch.setenv("MY_KEY", ACCESS_KEY_ID)
    monkeypatch.setenv("MY_SECRET", SECRET_ACCESS_KEY)
    resource.open()
    assert opened == [("s3://bucket/lake", StorageOptions(RIGHT))]
    assert leaks(f"{resource!r} {resource} {resource.model_dump_json()} {opened}") == []


@pytest.mark.parametrize("name", sorted(SECRET_OPTIONS))
def test_a_credential_among_the_options_is_refused_unseen(name: str) -> None:
    for value in (SECRET_ACCESS_KEY, dg.EnvVar("MY_SECRET")):
        with pytest.raises(InvalidInputError, match=f"'{name}' is a credential") as caught:
            TrinityLakeResource(root="s3://b/", storage_options={name: value, "region": "here"})  # type: ignore[arg-type]
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
    variables = SecretVariables(secret_access_key=SECRET_ACCESS_KEY)
    with pytest.raises(InvalidInputError, match="give the variable's name there") as caught:
        TrinityLakeResource(root="s3://bucket/", secret_options_from_env=variables).open()
    assert leaks(str(caught.value)) == []


@pytest.mark.parametrize("name", ["secret_access_key", "secret_key"])
def test_the_launchpad_refuses_credentials_before_a_run_is_recorded(name: str) -> None:
    resource = TrinityLakeResource(root="memory://never-made/")
    definitions = dg.Definitions.merge(maintenance_definitions(), dg.Definitions(resources={"lakehouse": resource}))
    given = {"root": "memory://never-made/", "storage_options": {name: SECRET_ACCESS_KEY}}
    with dg.instance_for_test() as instance:
        with pytest.raises(dg.DagsterInvalidConfigError, match=name) as caught:
            definitions.resolve_job_def("verify").execute_in_process(
                instance=instance, run_config={"resources": {"lakehouse": {"config": given}}, **QUIET}
            )
        assert instance.get_runs() == []
    assert leaks(str(caught.value)) == []


def test_options_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StorageSettings.from_environment().given() == {}
    monkeypatch.setenv(OPTIONS_VARIABLE, "endpoint=http://127.0.0.1:1,region=here")
    assert StorageSettings.from_environment().given() == {"endpoint": "http://127.0.0.1:1", "region": "here"}
    monkeypatch.setenv(OPTIONS_VARIABLE, f"region=here,secret_access_key={SECRET_ACCESS_KEY}")
    with pytest.raises(InvalidInputError, match="is a credential") as caught:
        StorageSettings.from_environment()
    assert leaks(str(caught.value)) == []
