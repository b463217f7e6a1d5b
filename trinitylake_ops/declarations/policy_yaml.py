"""The maintenance policy as YAML, which operators write and read.

Scalars have the types of YAML 1.2: ``22:00``, ``no`` and ``on`` are strings. Aliases, tags and duplicate keys are
rejected, so that the text of a document is unambiguous.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.policy.document import MAX_POLICY_BYTES, MaintenancePolicy, json_document

#: The largest YAML document, which may contain comments.
MAX_YAML_BYTES = 4 * MAX_POLICY_BYTES
_MAX_DEPTH = 16
_SCALARS = {
    "bool": (re.compile(r"true|false"), "tf"),
    "int": (re.compile(r"[-+]?[0-9]{1,30}"), "-+0123456789"),
    "float": (re.compile(r"[-+]?[0-9]{1,30}\.[0-9]{1,30}"), "-+0123456789"),
    "null": (re.compile(r"null|~|"), "n~\0"),
}


class _RejectedError(yaml.YAMLError):  # type: ignore[misc] # PyYAML has no types
    """The document contains something that is not allowed in a policy."""

    def __init__(self, problem: str, mark: Any):
        super().__init__(problem)
        self.problem = problem
        self.problem_mark = mark


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node. Raises _RejectedError for aliases, anchors, and deep nesting."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _RejectedError("anchors and aliases are not supported", event.start_mark)
        if self._depth == _MAX_DEPTH:
            raise _RejectedError("it is nested too deeply", event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping. Raises _RejectedError for keys that occur twice or are not strings."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise _RejectedError("a key is not a text", key.start_mark)
            if key.value in seen:
                raise _RejectedError("a key occurs twice", key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern.pattern})\Z"), ["" if c == "\0" else c for c in _first]
    )


def policy_of_yaml(text: str) -> MaintenancePolicy:
    """Read a policy from YAML or JSON.

    Raises:
        InvalidInputError: The text is not a valid policy. The message has one line.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_YAML_BYTES:
        raise InvalidInputError(f"the policy is larger than {MAX_YAML_BYTES} bytes")
    if text.lstrip().startswith('{"'):
        return MaintenancePolicy.of_document(json_document(text))
    try:
        document = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        problem = error.problem if isinstance(error, _RejectedError) else "it is not valid YAML"
        raise InvalidInputError(f"invalid policy: {where}{problem}") from None
    return MaintenancePolicy.of_document({} if document is None else document)


def policy_yaml(policy: MaintenancePolicy) -> str:
    """Return a policy as YAML, including all fields."""
    text: str = yaml.safe_dump(policy.to_document(), sort_keys=False, allow_unicode=True, width=120)
    return text
