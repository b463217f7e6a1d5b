"""The obstore clients of one container: where it is, who asks, and how long a request may take."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from azure.identity import DefaultAzureCredential
from obstore.store import AzureStore

from trinitylake_ops.storage.azure.account import Account
from trinitylake_ops.storage.azure.blob_client import MIN_BYTES_PER_SECOND
from trinitylake_ops.storage.azure.settings import AzureSettings

if TYPE_CHECKING:
    from obstore.store import AzureConfig, AzureCredential

#: Bodies up to this size share one client. Each doubling has a client of its own, with more time.
_SMALL_BODY_BYTES = 4 * 1024 * 1024
_ONE_DAY = timedelta(days=1)
_SCOPE = "https://storage.azure.com/.default"


class AzureStores:
    """Clients for the requests of one container. Nothing is read or sent before the first use. Thread-safe.

    A time-out of obstore belongs to a client, not to a request. Its time-out for reading runs while a body is sent,
    too. So uploads take a client whose time-outs allow for the size of the body. azure-identity resolves credentials
    that are neither options nor in the environment's variables for storage.
    """

    def __init__(self, container: str, account: Account, settings: AzureSettings):
        self._container = container
        self._account = account
        self._settings = settings
        self._lock = threading.Lock()
        self._by_allowance: dict[int | None, AzureStore] = {}

    def for_body(self, n_bytes: int = 0) -> AzureStore:
        """Return the client for a request with a body of this size, or with a short answer."""
        allowance_bytes = _SMALL_BODY_BYTES
        while allowance_bytes < n_bytes:
            allowance_bytes *= 2
        return self._store(allowance_bytes)

    def for_reading(self) -> AzureStore:
        """Return the client for answers of unknown size. The caller bounds the time of the transfer."""
        return self._store(None)

    def _store(self, allowance_bytes: int | None) -> AzureStore:
        found = self._by_allowance.get(allowance_bytes)
        if found is not None:
            return found
        with self._lock:
            if allowance_bytes not in self._by_allowance:
                self._by_allowance[allowance_bytes] = self._new_store(allowance_bytes)
            return self._by_allowance[allowance_bytes]

    def _new_store(self, allowance_bytes: int | None) -> AzureStore:
        settings = self._settings
        read_timeout, timeout = timedelta(seconds=settings.read_timeout_seconds), _ONE_DAY
        if allowance_bytes is not None:
            transfer = timedelta(seconds=allowance_bytes / MIN_BYTES_PER_SECOND)
            timeout = timedelta(seconds=settings.waiting_seconds) + transfer
            if allowance_bytes > _SMALL_BODY_BYTES:
                read_timeout += transfer
        credentials: dict[str, Any] = {}
        if self._account.key is None and self._account.sas_token is None:
            credentials["credential_provider"] = _token_provider()
        return AzureStore(
            self._container,
            config=self._config(),
            client_options={
                "allow_http": self._account.endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=settings.connect_timeout_seconds),
                "read_timeout": read_timeout,
                "timeout": timeout,
            },
            # A client that repeats a create after a lost answer meets its own file. RetryStorage repeats only safe
            # requests.
            retry_config={"max_retries": 0, "retry_timeout": timeout},
            **credentials,
        )

    def _config(self) -> AzureConfig:
        account = self._account
        # Defaults are given too, since obstore takes other values from the environment.
        config: AzureConfig = {
            "account_name": account.name,
            "endpoint": account.endpoint,
            "skip_signature": False,
            "use_azure_cli": False,
            "use_emulator": False,
            "use_fabric_endpoint": False,
        }
        if account.key is not None:
            return {**config, "account_key": account.key, "credential_type": "access_key"}
        if account.sas_token is not None:
            return {**config, "sas_key": account.sas_token, "credential_type": "sas_token"}
        return config


def _token_provider() -> Callable[[], AzureCredential]:
    """Return a provider of tokens for obstore. azure-identity keeps and renews them."""
    credential = DefaultAzureCredential()

    def current() -> AzureCredential:
        token = credential.get_token(_SCOPE)
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

    return current


class Fork:
    """Whether this process was forked after obstore was loaded.

    The runtime of obstore is one per process and has threads, which a forked child does not have. Every request there
    would wait for ever, also through a new client.
    """

    happened = False


def _note_fork() -> None:
    Fork.happened = True


os.register_at_fork(after_in_child=_note_fork)
