"""Conversion of operation options to Dagster configuration, and the signed-in user of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import InvalidOptionError
from trinitylake_ops.declarations.options import APPROVER, USER_IS_KNOWN, OneOf, Options
from trinitylake_ops.declarations.specs import OptionSpec, option_specs
from trinitylake_ops.errors import InvalidInputError

# Dagster+ sets this variable in all processes of a deployment, and this tag on runs that a user launches.
_DEPLOYMENT = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
_USER_TAG = "user"


def has_signed_in_users() -> bool:
    """Whether this process is part of Dagster+, which authenticates its users."""
    return bool(os.environ.get(_DEPLOYMENT))


def signed_in_user(run: dg.DagsterRun) -> str | None:
    """Return the user who launched a run, or None without Dagster+ or if a schedule or sensor launched the run.

    Without Dagster+, the tag is not trusted, because any client can launch a run with arbitrary tags.
    """
    return run.tags.get(_USER_TAG) or None if has_signed_in_users() else None


#: Types of configuration fields. They must not allow a user to read the environment of the process: the types that
#: Dagster derives from pydantic's str, int and bool also accept ``{env: NAME}``.
_TYPES: Mapping[Any, Any] = {bool: bool, int: int, float: float, str: str}

#: The empty run configuration of jobs without options, so that no run can be pointed at another lakehouse.
NO_OPTIONS = dg.ConfigMapping(lambda _config: {}, config_schema={})


def config_fields(options: type[Options]) -> dict[str, dg.Field]:
    """Convert options to Dagster fields with a type, a default and a description.

    An option without a default is required. Mutually exclusive options have no defaults. Numbers and flags may be null,
    which selects the default, because ``dagster job scaffold_config`` prints null.
    """
    return {spec.name: _config_field(spec, issubclass(options, OneOf)) for spec in option_specs(options)}


def _config_field(spec: OptionSpec, is_one_of_several: bool) -> dg.Field:
    kind = _config_type(spec)
    is_person = APPROVER in spec.marks
    if is_one_of_several:
        return dg.Field(kind, description=spec.description)
    if spec.is_required or (is_person and not has_signed_in_users()):
        return dg.Field(kind, description=spec.description, is_required=True)
    if spec.is_nullable or is_person or (spec.kind in (bool, int, float) and not spec.is_list):
        kind = dg.Noneable(kind)
    return dg.Field(kind, description=spec.description, default_value=spec.default)


def _config_type(spec: OptionSpec) -> Any:
    """Return the Dagster configuration type of an option."""
    if spec.choices:
        return dg.Enum("_".join(spec.choices), [dg.EnumValue(text) for text in spec.choices])
    if issubclass(spec.kind, Options):
        return (dg.Selector if spec.is_one_of else dg.Shape)(config_fields(spec.kind))
    return dg.Array(_TYPES[spec.kind]) if spec.is_list else _TYPES[spec.kind]


def checked_options(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Validate values of options. The approver may be omitted if Dagster+ authenticates the user.

    Args:
        options: The options of an operation.
        values: The values by option name.

    Raises:
        InvalidOptionError: A value is invalid. The message has one line.
    """
    try:
        return options.model_validate(values, context={USER_IS_KNOWN: has_signed_in_users()})
    except InvalidInputError as error:
        message = str(error)
    raise InvalidOptionError(message)
