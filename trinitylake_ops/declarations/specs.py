"""Specifications of the options of operations, from which commands, jobs and the reference are generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trinitylake_ops.declarations.options import CommandLine, OneOf, Options

#: The names of value types in messages and documentation.
_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One option of an operation."""

    name: str
    description: str
    #: The type of a value: bool, int, float, str, or a subclass of Options.
    kind: type[Any]
    #: The allowed values; empty if any value is allowed.
    choices: tuple[str, ...]
    is_list: bool
    #: Whether the value may be None.
    is_nullable: bool
    is_required: bool
    #: The default; None for a required option.
    default: Any
    #: The annotations of the type, such as bounds and the markers that this package defines.
    marks: tuple[Any, ...]

    @property
    def command_line(self) -> CommandLine:
        """The metavar and flag of the option on the command line."""
        marks = [mark for mark in reversed(self.marks) if isinstance(mark, CommandLine)]
        return CommandLine(
            metavar=next((mark.metavar for mark in marks if mark.metavar is not None), None),
            flag=next((mark.flag for mark in marks if mark.flag is not None), None),
            is_argument=any(mark.is_argument for mark in marks),
        )

    @property
    def members(self) -> list[OptionSpec]:
        """The options that make up this option; empty for a simple type."""
        return list(option_specs(self.kind)) if issubclass(self.kind, Options) else []

    @property
    def is_one_of(self) -> bool:
        """Whether exactly one of the members is set."""
        return issubclass(self.kind, OneOf)

    def bounds(self) -> tuple[Any, bool, Any]:
        """Return the minimum, whether the minimum itself is excluded, and the maximum. None means no bound."""
        names = ("ge", "gt", "le")
        limits = {name: getattr(mark, name) for mark in self.marks for name in names if hasattr(mark, name)}
        return limits.get("ge", limits.get("gt")), "gt" in limits, limits.get("le")

    def kind_text(self) -> str:
        """Return the type of the values in words, for the reference."""
        if self.choices:
            text = " or ".join(f"`{choice}`" for choice in self.choices)
        elif members := self.members:
            text = ("one of " if self.is_one_of else "") + ", ".join(f"`{one.name}`" for one in members)
        elif metavar := self.command_line.metavar:
            text = metavar.lower() if self.kind is str else _KINDS[self.kind]
        else:
            text = _KINDS[self.kind]
        return f"list of {text}" if self.is_list else text


def option_specs(options: type[Options] | None) -> Iterator[OptionSpec]:
    """Yield the options of a model in order."""
    for name, field in ({} if options is None else options.model_fields).items():
        annotation, marks, is_nullable = _present(field.annotation)
        choices: tuple[str, ...] = ()
        is_list = get_origin(annotation) is list
        if is_list:
            annotation, more, _ = _present(get_args(annotation)[0])
            marks += more
        if get_origin(annotation) is Literal:
            choices, annotation = get_args(annotation), str
        yield OptionSpec(
            name=name,
            description=field.description or "",
            kind=annotation,
            choices=choices,
            is_list=is_list,
            is_nullable=is_nullable,
            is_required=field.is_required(),
            default=None if field.is_required() else field.default,
            marks=(*field.metadata, *marks),
        )


def _present(annotation: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return a type without None and annotations, the annotations, and whether None was part of the type."""
    marks: tuple[Any, ...] = ()
    is_nullable = False
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            marks += tuple(more)
        elif get_origin(annotation) in (Union, UnionType):
            (annotation,) = (one for one in get_args(annotation) if one is not type(None))
            is_nullable = True
        else:
            return annotation, _flatten(marks), is_nullable


def _flatten(marks: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return annotations together with those that a ``Field(...)`` among them contains."""
    return tuple(one for mark in marks for one in (mark, *getattr(mark, "metadata", ())))
