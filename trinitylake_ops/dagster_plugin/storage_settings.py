"""Storage options in Dagster's configuration: plain options, and the environment variables with credentials.

The fields are generated from the specifications of the options. An option has one field for the scheme of the
lakehouse's root, such as ``endpoint``, and one for each scheme that accepts it, such as ``s3.endpoint``. The
configuration schema contains all names, so that Dagster rejects an unknown option before it creates a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import dagster as dg
from pydantic import ConfigDict, Field, ValidationInfo, create_model, field_validator, model_validator

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.options import COMMON_OPTIONS, OPTIONS_VARIABLE, Option, StorageOptions, is_secret
from trinitylake_ops.storage.registry import OWN_SCHEMES

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_ACCESS_KEY_ID = re.compile(r"(AKIA|ASIA)[A-Z0-9]{16}")
_SECRET_KEY_LENGTH = 40
#: Replaces the dot of an option name in the field name.
_DOT = "__"


def is_plain_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a literal string. An EnvVar is validated when a run resolves it."""
    return isinstance(value, str) and not isinstance(value, dg.EnvVar)


def _is_variable_name(text: str) -> bool:
    """Whether a string is a variable name, and neither an AWS credential nor the value of a variable."""
    is_like_secret_key = len(text) == _SECRET_KEY_LENGTH and text not in (text.lower(), text.upper())
    # A template such as "{{ env.NAME }}" inserts the value.
    is_value = text not in os.environ and text in os.environ.values()
    return bool(_VARIABLE_NAME.fullmatch(text)) and not (
        _ACCESS_KEY_ID.fullmatch(text) or is_like_secret_key or is_value
    )


class _OptionsConfig(dg.Config):
    """Storage options by name. Dagster's configuration schema contains the names and rejects all others."""

    # Each class builds its validators on first use.
    model_config = ConfigDict(hide_input_in_errors=True, defer_build=True)

    if TYPE_CHECKING:  # the fields are generated

        def __init__(self, **options: str | None): ...

        def __getattr__(self, name: str) -> Any: ...

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_names(cls, values: Any) -> Any:
        # Pydantic's own error would repeat the value, which may be a credential.
        names = sorted(set(values) - cls.names()) if isinstance(values, Mapping) else []
        if secret := next(filter(is_secret, names), None):
            raise InvalidInputError(
                f"{secret!r} is a credential, and Dagster displays configuration; set it in the environment of the"
                " process, or name its environment variable in secret_options_from_env"
            )
        if names:
            # Rejects a string that is not a well-formed name, without repeating it.
            StorageOptions(dict.fromkeys(names, ""))
            plain = ", ".join(name for name in cls.model_fields if _DOT not in name)
            raise InvalidInputError(f"unknown option {names[0]!r}; the options are {plain}, and each as SCHEME.NAME")
        return values

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all options."""
        return set(map(_name_of, cls.model_fields))

    def explicit_options(self) -> dict[str, str]:
        """Return the options that were set."""
        return self.model_dump(by_alias=True, exclude_none=True)

    def of_scheme(self, scheme: str, name: str) -> Any:
        """Return an option's value for one scheme. The name with the scheme takes precedence over the plain name."""
        return getattr(self, f"{scheme}{_DOT}{name}", None) or getattr(self, name)


def _name_of(field: str) -> str:
    """Return the name of a field's option. The field's own name is a Python identifier."""
    return field.replace(_DOT, ".")


def _specs() -> dict[str, dict[Option, list[str]]]:
    """Return the specifications of each option by its name, with and without a scheme, and the roots they apply to."""
    specs: dict[str, dict[Option, list[str]]] = {}
    for scheme in OWN_SCHEMES.values():
        for option in scheme.options:
            specs.setdefault(option.name, {}).setdefault(option, []).append(f"{scheme.name}://")
    specs |= {option.name: {option: ["all roots"]} for option in COMMON_OPTIONS}
    for scheme in OWN_SCHEMES.values():
        roots = f"{scheme.name}:// roots, even if the lakehouse has another scheme"
        specs |= {f"{scheme.name}.{option.name}": {option: [roots]} for option in scheme.options}
    return specs


_SPECS = _specs()


def _with_fields(base: type[_OptionsConfig], form: str, *, secret: bool) -> Any:
    """Create a class with a field for each option that is, or is not, a credential.

    Args:
        base: The class without fields.
        form: The template of a description, with the placeholders ``{help}`` and ``{accepted}``.
        secret: Whether the fields are for credentials.
    """
    fields: dict[str, Any] = {}
    for name, specs in _SPECS.items():
        if is_secret(name) == secret:
            texts: dict[str, list[str]] = {}
            for option, roots in specs.items():
                texts.setdefault(form.format(help=option.help, accepted=option.accepted), []).extend(roots)
            description = " ".join(f"{', '.join(roots)}: {text}." for text, roots in texts.items())
            alias = name if "." in name else None
            field = Field(default=None, alias=alias, description=description)
            fields[name.replace(".", _DOT)] = (str | None, field)
    return create_model(f"{base.__name__}Fields", __base__=base, __module__=__name__, **fields)


class _CheckedSettings(_OptionsConfig):
    """Validates the values of options."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        if is_plain_text(value):
            _check(list(_SPECS[_name_of(info.field_name or "")]), value)
        return value


def _check(options: list[Option], value: str) -> None:
    """Raise InvalidInputError for a value that none of the options with this name accepts."""
    for option in options:
        try:
            option.parse(value)
        except InvalidInputError:
            if option is options[-1]:
                raise
        else:
            return


if TYPE_CHECKING:
    _Settings = _CheckedSettings
else:
    _Settings = _with_fields(_CheckedSettings, "{help}; {accepted}", secret=False)


class StorageSettings(_Settings):
    """Storage options that are not credentials. Each storage accepts some of them (docs/storages/README.md)."""

    @classmethod
    def from_environment(cls) -> StorageSettings:
        """Read the options from TRINITYLAKE_STORAGE_OPTIONS, written as ``NAME=VALUE,NAME=VALUE``.

        Raises InvalidInputError, whose message contains no values.
        """
        return cls(**StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, "")))


class _CheckedVariables(_OptionsConfig):
    """Validates the names of variables."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_variable(cls, value: Any, info: ValidationInfo) -> Any:
        if is_plain_text(value) and not _is_variable_name(value):
            name = _name_of(info.field_name or "")
            raise InvalidInputError(
                f"the value of {name!r} in secret_options_from_env is not the name of an environment variable;"
                " set it to the name of the variable, not to the credential itself"
            )
        return value


if TYPE_CHECKING:
    _Variables = _CheckedVariables
else:
    _Variables = _with_fields(_CheckedVariables, "name of the environment variable with the {help}", secret=True)


class SecretVariables(_Variables):
    """Environment variables with credentials. Only the process that uses the storage reads their values."""

    def read(self) -> dict[str, str]:
        """Return the credentials. Raises InvalidInputError, whose message contains no values or variable names."""
        credentials: dict[str, str] = {}
        for name, variable in self.explicit_options().items():
            if variable not in os.environ:
                raise InvalidInputError(
                    f"the environment variable that secret_options_from_env names for {name!r} is not set in this"
                    " process; set it to the name of the variable, not to the credential itself"
                )
            credentials[name] = os.environ[variable]
        return credentials
