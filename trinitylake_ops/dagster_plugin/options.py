"""Options of operations as configuration of Dagster. The launchpad shows them, and refuses wrong ones before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin.runs.person import has_signed_in_users
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.options import NUMBER_TOO, USER_IS_KNOWN, Options

#: Types of options in Dagster's configuration. The types that it makes of pydantic's text, int and bool also take
#: ``{env: NAME}``. With these, a person who launches a run could read the environment of the process. Null stands for
#: the default: ``dagster job scaffold_config`` prints it then, where it else prints flags that are set, and zeros.
_TYPES: Mapping[Any, Any] = {
    bool: dg.Noneable(bool),
    int: dg.Noneable(int),
    float: dg.Noneable(float),
    str: str,
    list[str]: [str],
}
_TEXT_OR_NUMBER = dg.Noneable(dg.Any)

#: The run configuration of jobs without options: nothing, so that none is pointed at another lakehouse.
NO_OPTIONS = dg.ConfigMapping(lambda _nothing: {}, config_schema={})


def config_fields(options: type[Options]) -> dict[str, dg.Field]:
    """Return options for Dagster: type, default and description. Its type of text refuses numbers of versions."""
    return {
        name: dg.Field(
            _TEXT_OR_NUMBER if NUMBER_TOO in option.metadata else _TYPES[option.annotation],
            default_value=option.default,
            description=option.description,
        )
        for name, option in options.model_fields.items()
    }


def checked_options(options: type[Options], given: Mapping[str, Any]) -> Options:
    """Return options as given. Raises DagsterInvalidConfigError, of one line, for the first that is wrong.

    Who approved may be left out where Dagster+ knows the user.
    """
    try:
        return options.model_validate(given, context={USER_IS_KNOWN: has_signed_in_users()})
    except InvalidInputError as error:
        said = str(error)
    # The value is left out: it may hold what nobody should see.
    raise dg.DagsterInvalidConfigError(said, [], None)  # type: ignore[no-untyped-call]
