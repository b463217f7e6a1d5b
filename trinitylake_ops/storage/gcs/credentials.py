"""Credentials that an option gives, as google-auth has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.oauth2 import credentials as user_credentials
from google.oauth2 import service_account

from trinitylake_ops.storage.gcs.settings import check_kind


def given_credentials(credentials: str | Mapping[str, Any], scope: str) -> Any:
    """Return the credentials of a file, or of a text, whose tokens have a scope. Raises ``AUTH_ERRORS``."""
    if isinstance(credentials, str):
        with open(credentials, encoding="utf-8") as file:
            credentials = json.load(file)
    information = dict(check_kind(credentials))
    if information["type"] == "service_account":
        return service_account.Credentials.from_service_account_info(information, scopes=[scope])  # type: ignore[no-untyped-call]
    return user_credentials.Credentials.from_authorized_user_info(information, scopes=[scope])  # type: ignore[no-untyped-call]
