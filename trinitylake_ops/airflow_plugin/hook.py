"""The Airflow connection to a lakehouse."""

from __future__ import annotations

import asyncio
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from trinitylake_ops import Lakehouse
from trinitylake_ops.airflow_plugin.settings import LakehouseSettings
from trinitylake_ops.errors import TrinityLakeError

DEFAULT_CONNECTION = "trinitylake_default"


class TrinityLakeHook(BaseHook):
    """Opens the lakehouse of a connection with the type ``trinitylake``.

    The connection's host is the root, such as ``s3://bucket/lake`` or an absolute path. Its extra is a JSON object with
    ``storage_options``, ``allowed_roots``, ``isolation``, ``engine`` and ``spark``. Airflow keeps it encrypted.
    """

    conn_name_attr = "trinitylake_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "trinitylake"
    hook_name = "TrinityLake"

    def __init__(self, trinitylake_conn_id: str = DEFAULT_CONNECTION) -> None:
        super().__init__()
        self.trinitylake_conn_id = trinitylake_conn_id

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Return the fields of the connection form."""
        return {
            "hidden_fields": ["port", "schema", "login", "password"],
            "relabeling": {"host": "Root"},
            "placeholders": {"host": "s3://bucket/lake", "extra": '{"storage_options": {"region": "eu-central-1"}}'},
        }

    def settings(self) -> LakehouseSettings:
        """Return the connection settings. Raises InvalidInputError."""
        connection = self.get_connection(self.trinitylake_conn_id)
        settings = LakehouseSettings.of(connection.host, connection.extra)
        mask_secret(settings.model_dump())  # masks the values whose names Airflow considers secret
        for secret in settings.secrets:
            mask_secret(secret)
        return settings

    def get_conn(self) -> Lakehouse:
        """Return the lakehouse. Raises InvalidInputError, LakehouseNotFoundError, or StorageError."""
        return self.settings().open()

    async def aget_conn(self) -> Lakehouse:
        """Return the lakehouse in a trigger or an asynchronous task.

        Opening the lakehouse and masking its secrets in logs would block the event loop, so both run in a thread.
        """
        return await asyncio.to_thread(self.get_conn)

    def test_connection(self) -> tuple[bool, str]:
        """Return whether the lakehouse can be read, with its latest version or the error."""
        try:
            lake = self.get_conn()
            return True, f"version {lake.latest_version()} of {lake.root}"
        except TrinityLakeError as error:
            return False, str(error)
