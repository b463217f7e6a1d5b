"""Emulators of Google's token services, and a storage that enforces the access boundary of each token.

The exchange is OAuth's (RFC 8693), as Google documents it:
https://docs.cloud.google.com/iam/docs/reference/sts/rest/v1/TopLevel/token. Conditions of a boundary are evaluated by
Google's own implementation of their language (CEL). The permissions of roles are those that Google lists. The storage
is the emulator behind a proxy. Tests with these emulators do not cover differences from Google's services.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

import jwt
from cel_expr_python import cel
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.servers.gcs import GcsServer
from tests.servers.google_rights import Right, RightsProxy, rejection

ACCOUNT = "server@project.example"
_TOKEN_TYPE = "urn:ietf:params:oauth:token-type:access_token"
_SCOPES = "https://www.googleapis.com/auth/"
#: https://docs.cloud.google.com/iam/docs/roles-permissions/storage
ROLES = {
    "roles/storage.objectViewer": {"storage.objects.get", "storage.objects.list"},
    "roles/storage.objectCreator": {"storage.objects.create"},
}
_ACCOUNT_PERMISSIONS = {
    *(f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list")),
    "storage.buckets.get",
}
_MAX_RULES, _MAX_EXPRESSION_CHARS = 10, 2_048
_RESOURCE = "//storage.googleapis.com/projects/_/buckets/"


def _attribute(api: Any, name: str, default: str) -> str:
    attributes: Mapping[str, str] = api.plain_value() if hasattr(api, "plain_value") else api
    return str(dict(attributes).get(name, default))


_MAP = cel.Type.Map(cel.Type.STRING, cel.Type.STRING)
_GET_ATTRIBUTE = cel.Overload(
    "get_attribute",
    return_type=cel.Type.STRING,
    parameters=[_MAP, cel.Type.STRING, cel.Type.STRING],
    is_member=True,
    impl=_attribute,
)
#: The attributes that a condition may use. A condition with other attributes does not compile.
CONDITIONS = cel.NewEnv(
    variables={"resource": _MAP, "api": _MAP}, functions=[cel.FunctionDecl("getAttribute", [_GET_ATTRIBUTE])]
)


@functools.cache
def _key() -> rsa.RSAPrivateKey:
    """Return the key of the account, which is generated once because this is slow."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2_048)


@dataclass(frozen=True)
class Rule:
    """A rule of a boundary."""

    bucket: str
    permissions: frozenset[str]
    condition: Any

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Rule:
        """Parse the rule of a boundary. Raises ValueError if Google would reject it."""
        resource, roles = payload["availableResource"], payload["availablePermissions"]
        expression = payload["availabilityCondition"]["expression"]
        if not resource.startswith(_RESOURCE) or len(expression) > _MAX_EXPRESSION_CHARS:
            raise ValueError("not a bucket, or the expression is too long")
        try:
            condition = CONDITIONS.compile(expression)
        except RuntimeError as error:
            raise ValueError(f"the condition does not compile: {error}") from None
        if condition.return_type() != cel.Type.BOOL:
            raise ValueError("the condition is not boolean")
        allowed = frozenset().union(*(ROLES[role.removeprefix("inRole:")] for role in roles))
        return cls(resource.removeprefix(_RESOURCE), allowed, condition)

    def allows(self, right: Right) -> bool:
        """Whether the rule allows a right."""
        if right.bucket != self.bucket or right.permission not in self.permissions:
            return False
        attributes = {}
        if right.permission == "storage.objects.list":
            attributes["storage.googleapis.com/objectListPrefix"] = right.list_prefix
        is_allowed: bool = self.condition.eval(data={"resource": {"name": right.resource}, "api": attributes}).value()
        return is_allowed


@dataclass(frozen=True)
class Token:
    """An issued token. Without rules it has all rights of the account."""

    expires_s: float
    scope: str
    rules: tuple[Rule, ...] | None = None


@dataclass(frozen=True)
class RightsCheck:
    """The check of a right that a request needs, and its result."""

    right: Right
    is_downscoped: bool
    is_allowed: bool


@dataclass
class Google:
    """The token service and the storage in one server."""

    server: GcsServer
    has_uniform_access: bool = True
    lifetime_s: int = 3_600
    tokens: dict[str, Token] = field(default_factory=dict)
    #: The boundaries of all issued tokens.
    boundaries: list[dict[str, Any]] = field(default_factory=list)
    rights_checks: list[RightsCheck] = field(default_factory=list)
    #: Status and body of responses that replace the next responses of the token exchange.
    replaced_responses: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.proxy = _Proxy(self)
        self.endpoint = self.proxy.endpoint
        self.sts_endpoint = f"{self.endpoint}/v1/token"

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options of the catalog server, with the key of its account."""
        no_encryption = serialization.NoEncryption()
        private_key = (
            _key().private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_encryption).decode()
        )
        account = {
            "type": "service_account",
            "client_email": ACCOUNT,
            "private_key": private_key,
            "private_key_id": "1",
            "token_uri": f"{self.endpoint}/token",
        }
        return {"endpoint": self.endpoint, "credentials": json.dumps(account)}

    def issue_account_token(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Issue a token for a request that the account's key has signed."""
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        claims = jwt.decode(
            form["assertion"],
            _key().public_key(),
            algorithms=["RS256"],
            audience="https://oauth2.googleapis.com/token",  # the same for every address of the service
            issuer=ACCOUNT,
        )
        assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
        return self._issue_token(Token(time.time() + self.lifetime_s, claims["scope"]))

    def exchange_token(self, headers: Mapping[str, str], body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Respond to a request for a downscoped token."""
        if self.replaced_responses:
            status, data = self.replaced_responses.pop(0)
            return status, {"Content-Type": "application/json"}, data
        assert headers["Content-Type"] == "application/x-www-form-urlencoded"
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        subject = self.tokens.get(form.get("subject_token", ""))
        if form.get("grant_type") != "urn:ietf:params:oauth:grant-type:token-exchange":
            return _oauth_error("unsupported_grant_type", "the grant type is not supported")
        if (form.get("subject_token_type"), form.get("requested_token_type")) != (_TOKEN_TYPE, _TOKEN_TYPE):
            return _oauth_error("invalid_request", "the token types are not supported")
        if subject is None or subject.rules is not None or subject.expires_s < time.time():
            return _oauth_error("invalid_grant", f"invalid token: {form.get('subject_token')}")
        if subject.scope != f"{_SCOPES}cloud-platform":
            return _oauth_error("invalid_grant", "the token lacks the scope cloud-platform")
        boundary = json.loads(unquote(form["options"]))
        try:
            rules = tuple(Rule.of(payload) for payload in boundary["accessBoundary"]["accessBoundaryRules"])
        except (ValueError, KeyError) as error:
            return _oauth_error("invalid_request", str(error))
        assert 1 <= len(rules) <= _MAX_RULES
        self.boundaries.append(boundary)
        return self._issue_token(Token(subject.expires_s, subject.scope, rules), issued_token_type=_TOKEN_TYPE)

    def _issue_token(self, token: Token, **fields: str) -> tuple[int, Mapping[str, str], bytes]:
        value = f"ya29.{secrets.token_urlsafe(24)}"
        self.tokens[value] = token
        payload = {
            "access_token": value,
            "token_type": "Bearer",
            "expires_in": int(token.expires_s - time.time()),
            **fields,
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(payload).encode()

    def token_of(self, headers: Mapping[str, str]) -> Token | None:
        """Return the token of a request, or None if it has no valid token."""
        match = re.fullmatch(r"Bearer (\S+)", headers.get("Authorization", ""))
        token = self.tokens.get(match[1]) if match else None
        return token if token is not None and token.expires_s > time.time() else None

    def has_right(self, headers: Mapping[str, str], right: Right) -> bool:
        """Whether a request's token has a right."""
        token = self.token_of(headers)
        rules = None if token is None else token.rules
        is_allowed = token is not None and right.permission in _ACCOUNT_PERMISSIONS
        is_allowed = is_allowed and (rules is None or any(rule.allows(right) for rule in rules))
        self.rights_checks.append(RightsCheck(right, rules is not None, is_allowed))
        return is_allowed


class _Proxy(RightsProxy):
    def __init__(self, google: Google):
        super().__init__(google.server, google.has_right)
        self._google = google

    def respond(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        google = self._google
        if (method, target) == ("POST", "/token"):
            return google.issue_account_token(body)
        if (method, target) == ("POST", "/v1/token"):
            return google.exchange_token(headers, body)
        if google.token_of(headers) is None:
            return rejection(401, "Invalid Credentials")
        status, response_headers, data = super().respond(method, target, headers, body)
        if status == 200 and target.partition("?")[0] == f"/storage/v1/b/{self.server.bucket}":
            payload = {**json.loads(data), "iamConfiguration": {}}
            payload["iamConfiguration"]["uniformBucketLevelAccess"] = {"enabled": google.has_uniform_access}
            data = json.dumps(payload).encode()
        return status, response_headers, data


def _oauth_error(code: str, description: str) -> tuple[int, Mapping[str, str], bytes]:
    payload = {"error": code, "error_description": description}
    return 400, {"Content-Type": "application/json"}, json.dumps(payload).encode()
