"""The obstore clients of one container: where it is, who asks, and how long a request may take."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from azure.identity import DefaultAzureCredential
from obstore.store import AzureStore

from trinitylake_ops.storage.azure.account import Account
from trinitylake_ops.storage.azure.settings import AzureSettings
from trinitylake_ops.storage.remote.obstore_clients import ObstoreClients

if TYPE_CHECKING:
    from obstore.store import AzureConfig, AzureCredential, ClientConfig

_SCOPE = "https://storage.azure.com/.default"


class AzureStores(ObstoreClients[AzureStore]):
    """Clients for the requests of one container.

    azure-identity resolves credentials that are neither options nor in the environment's variables for storage.
    """

    def __init__(self, container: str, account: Account, settings: AzureSettings):
        super().__init__(settings)
        self._container = container
        self._account = account

    def _new_store(self, limits: ClientConfig, timeout: timedelta) -> AzureStore:
        credentials: dict[str, Any] = {}
        if self._account.key is None and self._account.sas_token is None:
            credentials["credential_provider"] = _token_provider()
        return AzureStore(
            self._container,
            config=self._config(),
            client_options={"allow_http": self._account.endpoint.startswith("http://"), **limits},
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
