"""Storage options: validation and redaction."""

import pickle

import pytest

from trinitylake_ops.errors import InvalidInputError, StorageError
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, is_secret, redact_assignments
from trinitylake_ops.storage.registry import OWN_SCHEMES

OPTIONS = {
    "access_key_id": "the-key",
    "password": "the-word",
    "secret_access_key": "the-key-and-more",
    "session_token": "the-token",
    "credentials": "the-credentials",
    "account_key": "the-account-key",
    "sas_token": "sv=1&sig=the-signature%3D",
    "connection_string": "AccountName=a;AccountKey=the-other-key=;EndpointSuffix=x",
    "region": "here",
}


def test_text_hides_credentials_and_pickles_contain_them() -> None:
    options = StorageOptions(OPTIONS)
    for text in (repr(options), str(options), f"{options}", repr([options]), f"{options!r:>400}"):
        assert "the-" not in text
        assert "here" in text
    assert pickle.loads(pickle.dumps(options)) == options == OPTIONS
    assert hash(pickle.loads(pickle.dumps(options))) == hash(options)
    assert {name for name, value in options.shown().items() if value == "***"} == set(OPTIONS) - {"region"}


SECRETS = {option for scheme in OWN_SCHEMES.values() for option in scheme.options if option.is_secret}


def test_every_credential_is_hidden_by_its_name() -> None:
    assert {option.name for option in SECRETS} == set(OPTIONS) - {"region"}
    for option in SECRETS:
        assert is_secret(option.name) and is_secret(f"s3.{option.name}")
        assert redact_assignments(f"{option.name}=hush, x") == f"{option.name}=***, x"


@pytest.mark.parametrize(
    "variable",
    sorted(
        {
            environment_name
            for option in SECRETS
            for environment_name in option.environment
            if not environment_name.endswith("CREDENTIALS")
        }
    ),
)
def test_environment_variable_of_every_credential_is_hidden(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "secret-in-environment")
    assert StorageOptions().redact("a secret-in-environment") == "a ***"


@pytest.mark.parametrize(
    ("name", "secret"), [("api_token", False), ("slow", True), ("key_prefix", False), ("signature", True)]
)
def test_name_of_an_option_must_match_whether_it_is_secret(name: str, *, secret: bool) -> None:
    with pytest.raises(InvalidInputError, match=f"'{name}'"):
        Option(name, "x", is_secret=secret)


@pytest.mark.parametrize(
    ("option", "valid_value", "expected", "invalid_values"),
    [
        (Option("a", "x"), "b c", "b c", ["", "a\nb"]),
        (Option("a", "x", Kind.TOKEN), "b", "b", ["", "b c", "b\x7f"]),
        (Option("a", "x", Kind.FLAG), "true", True, ["", "True", "1"]),
        (Option("a", "x", Kind.CHOICE, choices=("b", "c")), "c", "c", ["", "d", "b,c"]),
        (Option("a", "x", Kind.NUMBER, minimum=1, maximum=5), "1.5", 1.5, ["", "0.5", "6", "nan", "inf", "x"]),
        (Option("a", "x", Kind.INTEGER, minimum=1), "12", 12, ["", "0", "1.0", "1e3", "-1", " 1", "1" * 19]),
        (Option("a", "x", Kind.URL), "http://h:1/p", "http://h:1/p", ["", "h", "ftp://h", "http://u@h", "http://h?q"]),
    ],
    ids=lambda expected: expected.kind.name if isinstance(expected, Option) else "",
)
def test_option_values_are_converted(
    option: Option, valid_value: str, expected: object, invalid_values: list[str]
) -> None:
    assert option.value({"a": valid_value}) == expected
    assert option.value({}) is None
    for invalid_value in invalid_values:
        with pytest.raises(InvalidInputError, match="'a'"):
            option.value({"a": invalid_value})


def test_longest_credential_is_redacted_first() -> None:
    assert StorageOptions(OPTIONS).redact("x the-key-and-more the-key the-token y") == "x *** *** *** y"
    assert StorageOptions({"session_token": ""}).redact("text") == "text"


def test_parts_of_credentials_are_redacted() -> None:
    text = "the-other-key= sig=the-signature%3D or the-signature= of AccountName=a"
    assert StorageOptions(OPTIONS).redact(text) == "*** sig=*** or *** of AccountName=a"


@pytest.mark.parametrize("name", ["", "A", "with space", "LeakedSecret", "a=b", "x" * 41, "1a", "a/b+c"])
def test_invalid_option_names_are_rejected_and_not_shown(name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        StorageOptions({name: "v"})
    assert name == "" or name not in str(caught.value).replace("has a name", "")


@pytest.mark.parametrize("options", [{"region": 1}, {1: "region"}, {"access_key_id": b"the-key"}])
def test_options_that_are_not_strings_are_rejected(options: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        StorageOptions(options)
    assert "the-key" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        (" , ", {}),
        ("region=here", {"region": "here"}),
        ("endpoint=http://127.0.0.1:1/?a=b, region=", {"endpoint": "http://127.0.0.1:1/?a=b", "region": ""}),
    ],
)
def test_options_text_is_parsed(text: str, options: dict[str, str]) -> None:
    assert StorageOptions.parse(text) == options


@pytest.mark.parametrize("text", ["the-key", "region=here,the-key", "The-key=x", "=the-key"])
def test_invalid_options_text_is_not_shown(text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        StorageOptions.parse(text)
    assert "the-key" not in str(caught.value).lower()


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("no command 'secret_access_key=abc'", "no command 'secret_access_key=***"),
        ("access_key_id: abc, region=here", "access_key_id: ***, region=here"),
        ('{"session_token": "abc", "x": 1}', '{"session_token": ***, "x": 1}'),
        ("connection_string=AccountName=a;AccountKey=b, x", "connection_string=***, x"),
        ("abfss://box@account.dfs.core.windows.net/", "abfss://box@account.dfs.core.windows.net/"),
        ("abfss://Key+/==@account.dfs.core.windows.net/", "abfss://***@account.dfs.core.windows.net/"),
        ("abfss://Key==@account.dfs.core.windows.net/", "abfss://***@account.dfs.core.windows.net/"),
        ("s3://box@account.dfs.core.windows.net/", "s3://***@account.dfs.core.windows.net/"),
        ("unknown option 'session_token'; see -h", "unknown option 'session_token'; see -h"),
    ],
)
def test_assignments_in_text_are_redacted(text: str, redacted: str) -> None:
    assert redact_assignments(text) == redacted


def test_credentials_of_the_environment_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-in-environment")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    assert StorageOptions().redact("a secret-in-environment x") == "a *** x", "short values are not redacted"


def test_options_with_a_scheme_apply_to_its_roots() -> None:
    options = StorageOptions({"region": "here", "s3.region": "there", "s3.endpoint": "http://x", "gs.project": "p"})
    assert dict(options.of_scheme("s3")) == {"region": "there", "endpoint": "http://x"}
    assert dict(options.of_scheme("gs", is_own=False)) == {"project": "p"}
    assert options.beyond("s3://a/", "s3://b/") is options
    assert options.beyond("redis://a:1/0/x/", "gs://b/") == StorageOptions(
        {"s3.region": "there", "s3.endpoint": "http://x", "gs.project": "p"}
    )
    assert StorageOptions({"region": "here"}).beyond("s3://a/", "gs://b/") is None


def test_credentials_with_a_scheme_are_hidden() -> None:
    options = StorageOptions({"s3.secret_access_key": "the-secret-key", "redis.password": "the-password"})
    assert options.shown() == {"s3.secret_access_key": "***", "redis.password": "***"}
    assert options.redact("the-password and the-secret-key") == "*** and ***"


UNUSUAL_VALUES = (
    "http://user:option-secret@host/",
    "AccountKey=option-secret;x",
    "sig=option-secret",
    "option-secret" * 5,
    "x" * 100_000,
)


@pytest.mark.parametrize("value", UNUSUAL_VALUES, ids=range(len(UNUSUAL_VALUES)))
@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("s3://bucket/", "client"),
        ("s3://bucket/", "read_timeout_seconds"),
        ("dynamodb://table/", "create_table"),
        ("redis://host/0/name/", "durability"),
        ("redis://host/0/name/", "wait_replicas"),
        ("hdfs://host/", "replication"),
        ("file:///lake/", "fsync"),
        ("file:///lake/", "whole_file_limit_bytes"),
    ],
)
def test_message_hides_long_and_unusual_values(root: str, name: str, value: str) -> None:
    """The value may be a credential that was passed to the wrong option."""
    with pytest.raises(InvalidInputError) as caught:
        open_storage(root, {name: value})
    assert "option-secret" not in str(caught.value)


@pytest.mark.parametrize("root", ["s3://bucket/", "dynamodb://table/"])
def test_messages_of_client_libraries_are_shortened(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "x" * 100_000)
    keys = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b"}
    with pytest.raises(StorageError) as caught:
        open_storage(root, keys).read("f")
    assert len(str(caught.value)) < 600
