"""Tokens of other issuers (OIDC): signed JSON Web Tokens, their issuers' keys, and what their claims allow here."""
