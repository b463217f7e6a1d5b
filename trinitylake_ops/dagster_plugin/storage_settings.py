"""Options of storages in Dagster's configuration: those that may be shown, and variables with the credentials.

The fields are generated from the specifications of the options. An option has one field for roots of the lakehouse's
scheme, ``endpoint``, and one for each scheme that accepts it, ``s3.endpoint``. Dagster knows all their names, so it
rejects others before a run exists.
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
#: What stands for the dot of an option in the name of its field.
_BETWEEN = "__"


def is_plain_text(given: Any) -> TypeGuard[str]:
    """Whether a field was given a value itself. The value of an EnvVar comes here when a run resolves it."""
    return isinstance(given, str) and not isinstance(given, dg.EnvVar)


def _is_variable_name(given: str) -> bool:
    """Whether this is a variable's name, and not a credential of AWS or a variable's value."""
    is_like_secret_key = len(given) == _SECRET_KEY_LENGTH and given not in (given.lower(), given.upper())
    # a template put the value there, "{{ env.NAME }}"
    is_value = given not in os.environ and given in os.environ.values()
    return bool(_VARIABLE_NAME.fullmatch(given)) and not (
        _ACCESS_KEY_ID.fullmatch(given) or is_like_secret_key or is_value
    )


class _OptionsConfig(dg.Config):
    """Options by their names, which Dagster's configuration schema knows. Others are refused before a run exists."""

    # Only the classes that are used build their validators, and only when they are used.
    model_config = ConfigDict(hide_input_in_errors=True, defer_build=True)

    if TYPE_CHECKING:  # the fields are generated

        def __init__(self, **options: str | None): ...

        def __getattr__(self, name: str) -> Any: ...

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_names(cls, given: Any) -> Any:
        # Pydantic's own error would repeat the value, which may be a credential.
        names = sorted(set(given) - cls.names()) if isinstance(given, Mapping) else []
        if secret := next(filter(is_secret, names), None):
            raise InvalidInputError(
                f"{secret!r} is a credential and Dagster shows configuration: leave it to the environment of the"
                " process, or name its environment variable in secret_options_from_env"
            )
        if names:
            # refuses a text that does not look like a name, and does not show it
            StorageOptions(dict.fromkeys(names, ""))
            plain = ", ".join(name for name in cls.model_fields if _BETWEEN not in name)
            raise InvalidInputError(f"unknown option {names[0]!r}; there are {plain}, and each as SCHEME.NAME")
        return given

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all options."""
        return set(map(_name_of, cls.model_fields))

    def explicit_options(self) -> dict[str, str]:
        """Return the options that were set."""
        return self.model_dump(by_alias=True, exclude_none=True)

    def of_scheme(self, scheme: str, name: str) -> Any:
        """Return what was set as an option of one scheme: under its name with the scheme, else without."""
        return getattr(self, f"{scheme}{_BETWEEN}{name}", None) or getattr(self, name)


def _name_of(field: str) -> str:
    """Return the name of the option of a field, whose own name must be a word of Python."""
    return field.replace(_BETWEEN, ".")


def _specs() -> dict[str, dict[Option, list[str]]]:
    """Return the specifications of each option, without and with a scheme in its name, and where each applies."""
    specs: dict[str, dict[Option, list[str]]] = {}
    for scheme in OWN_SCHEMES.values():
        for option in scheme.options:
            specs.setdefault(option.name, {}).setdefault(option, []).append(f"{scheme.name}://")
    specs |= {option.name: {option: ["all roots"]} for option in COMMON_OPTIONS}
    for scheme in OWN_SCHEMES.values():
        roots = f"{scheme.name}:// roots, also where the lakehouse has another scheme"
        specs |= {f"{scheme.name}.{option.name}": {option: [roots]} for option in scheme.options}
    return specs


_SPECS = _specs()


def _with_fields(base: type[_OptionsConfig], form: str, *, secret: bool) -> Any:
    """Return a class with a field for each option that is, or is not, a credential.

    Args:
        base: the class without fields.
        form: the description of an option, with its help and accepted values as ``{help}`` and ``{accepted}``.
        secret: whether the fields are for credentials.
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
            fields[name.replace(".", _BETWEEN)] = (str | None, field)
    return create_model(f"{base.__name__}Fields", __base__=base, __module__=__name__, **fields)


class _CheckedSettings(_OptionsConfig):
    """Checks of the values of options."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, given: Any, info: ValidationInfo) -> Any:
        if is_plain_text(given):
            _check(list(_SPECS[_name_of(info.field_name or "")]), given)
        return given


def _check(options: list[Option], value: str) -> None:
    """Raise InvalidInputError for a value that none of the options of one name accepts."""
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
    """Options of storages that may be shown. Each storage accepts some of them (docs/storages/README.md)."""

    @classmethod
    def from_environment(cls) -> StorageSettings:
        """Read the options from TRINITYLAKE_STORAGE_OPTIONS, written as ``NAME=VALUE,NAME=VALUE``.

        Raises InvalidInputError, whose message contains no values.
        """
        return cls(**StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, "")))


class _CheckedVariables(_OptionsConfig):
    """Checks of the names of variables."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_variable(cls, given: Any, info: ValidationInfo) -> Any:
        if is_plain_text(given) and not _is_variable_name(given):
            name = _name_of(info.field_name or "")
            raise InvalidInputError(
                f"what secret_options_from_env has for {name!r} is no name of an environment variable;"
                " give the variable's name there, not the credential itself"
            )
        return given


if TYPE_CHECKING:
    _Variables = _CheckedVariables
else:
    _Variables = _with_fields(_CheckedVariables, "name of the environment variable with the {help}", secret=True)


class SecretVariables(_Variables):
    """Environment variables with options that nobody may see. The process that needs them reads them."""

    def read(self) -> dict[str, str]:
        """Return the credentials. Raises InvalidInputError, which repeats neither value nor variable."""
        found: dict[str, str] = {}
        for name, variable in self.explicit_options().items():
            if variable not in os.environ:
                raise InvalidInputError(
                    f"the environment variable that secret_options_from_env names for {name!r} is not set in this"
                    " process; give the variable's name there, not the credential itself"
                )
            found[name] = os.environ[variable]
        return found
