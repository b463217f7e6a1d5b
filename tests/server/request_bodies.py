"""Request bodies like those that clients send."""

from __future__ import annotations

import time
import uuid
from typing import Any

SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": 1, "name": "id", "type": "long", "required": False}],
}
WIDER_SCHEMA = {**SCHEMA, "fields": [*SCHEMA["fields"], {"id": 2, "name": "name", "type": "string", "required": False}]}
TABLES = "/v1/main/namespaces/ns/tables"
TABLE = f"{TABLES}/t"
COMMIT = "/v1/main/transactions/commit"


def create_body(name: str = "t", **fields: Any) -> dict[str, Any]:
    return {"name": name, "schema": SCHEMA, **fields}


def commit_of(
    *updates: dict[str, Any], requirements: tuple[dict[str, Any], ...] = (), name: str = "t"
) -> dict[str, Any]:
    identifier = {"namespace": ["ns"], "name": name}
    return {"identifier": identifier, "requirements": list(requirements), "updates": list(updates)}


def properties(**updates: str) -> dict[str, Any]:
    return {"action": "set-properties", "updates": updates}


def new_key(age_ms: int = 0) -> str:
    """Return a UUID version 7 whose timestamp is ``age_ms`` ago."""
    timestamp_ms = int(time.time() * 1_000) - age_ms
    random = uuid.uuid4().int
    return str(
        uuid.UUID(
            int=(timestamp_ms << 80) | (0x7 << 76) | (random & (0xFFF << 64)) | (0b10 << 62) | random & (2**62 - 1)
        )
    )
