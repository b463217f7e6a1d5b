"""Options of operations as configuration of Dagster, and the user who started a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import InvalidOptionError
from trinitylake_ops.declarations.options import APPROVER, USER_IS_KNOWN, OneOf, Options
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
    fields = {}
    for name, option in options.model_fields.items():
        kind = _config_type(option.annotation)
        is_required = option.is_required() or (APPROVER in option.metadata and not has_signed_in_users())
        if issubclass(options, OneOf):
            kind, settings = _config_type(_present(option.annotation)), {}
        elif is_required:
            settings = {"is_required": True}
        else:
            is_nullable = option.annotation in (bool, int, float) or APPROVER in option.metadata
            kind = dg.Noneable(kind) if is_nullable else kind
            settings = {"default_value": option.default}
        fields[name] = dg.Field(kind, description=option.description, **settings)
    return fields


def _config_type(annotation: Any) -> Any:
    """Return the type of Dagster's configuration for a type of options."""
    if get_origin(annotation) is Annotated:
        return _config_type(get_args(annotation)[0])
    if (present := _present(annotation)) is not annotation:
        return dg.Noneable(_config_type(present))
    if get_origin(annotation) is Literal:
        texts = get_args(annotation)
        return dg.Enum("_".join(texts), [dg.EnumValue(text) for text in texts])
    if get_origin(annotation) is list:
        return dg.Array(_config_type(get_args(annotation)[0]))
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return (dg.Selector if issubclass(annotation, OneOf) else dg.Shape)(config_fields(annotation))
    return _TYPES[annotation]


def _present(annotation: Any) -> Any:
    """Return the type of an option that is not None, and any other type as it is."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    (present,) = (one for one in get_args(annotation) if one is not type(None))
    return present


def checked_options(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Return options of some values. Raises InvalidOptionError, of one line, for the first that is wrong.

    Who approved may be left out where Dagster+ knows the user.
    """
    try:
        return options.model_validate(values, context={USER_IS_KNOWN: has_signed_in_users()})
    except InvalidInputError as error:
        message = str(error)
    raise InvalidOptionError(message)
