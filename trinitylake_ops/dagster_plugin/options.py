"""Options of operations as configuration of Dagster, and the user who started a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import InvalidOptionError
from trinitylake_ops.declarations.options import APPROVER, USER_IS_KNOWN, OneOf, Options
from trinitylake_ops.declarations.specs import OptionSpec, option_specs
from trinitylake_ops.errors import InvalidInputError

# Dagster+ sets this variable in all processes of a deployment, and this tag on runs that a person launches.
_DEPLOYMENT = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
_USER_TAG = "user"


def has_signed_in_users() -> bool:
    """Whether this process is part of Dagster+, which knows its users."""
    return bool(os.environ.get(_DEPLOYMENT))


def signed_in_user(run: dg.DagsterRun) -> str | None:
    """Return the user who launched a run. None for a run of a schedule or sensor, and without Dagster+.

    Elsewhere whoever launches a run may give it any tag, so the tag says nothing there.
    """
    return run.tags.get(_USER_TAG) or None if has_signed_in_users() else None


#: Types that a person who launches a run cannot use to read the environment of the process: those that Dagster makes of
#: pydantic's text, int and bool also take ``{env: NAME}``.
_TYPES: Mapping[Any, Any] = {bool: bool, int: int, float: float, str: str}

#: The run configuration of jobs without options: nothing, so that no run is pointed at another lakehouse.
NO_OPTIONS = dg.ConfigMapping(lambda _nothing: {}, config_schema={})


def config_fields(options: type[Options]) -> dict[str, dg.Field]:
    """Return options for Dagster: type, default and description.

    An option without a default is required. Of options of which exactly one is set, none has a default. Numbers and
    flags may be null, which is their default: ``dagster job scaffold_config`` prints that.
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
    """Return the type of Dagster's configuration for an option."""
    if spec.choices:
        return dg.Enum("_".join(spec.choices), [dg.EnumValue(text) for text in spec.choices])
    if issubclass(spec.kind, Options):
        return (dg.Selector if spec.is_one_of else dg.Shape)(config_fields(spec.kind))
    return dg.Array(_TYPES[spec.kind]) if spec.is_list else _TYPES[spec.kind]


def checked_options(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Return options of some values. Raises InvalidOptionError, of one line, for the first that is wrong.

    Who approved may be left out where Dagster+ knows the user.
    """
    try:
        return options.model_validate(values, context={USER_IS_KNOWN: has_signed_in_users()})
    except InvalidInputError as error:
        message = str(error)
    raise InvalidOptionError(message)
