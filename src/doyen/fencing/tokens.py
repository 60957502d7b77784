"""Tokens as fenced resources take them. May import errors only."""

from __future__ import annotations

from typing import Protocol

from doyen.errors import ConfigError, StaleToken

__all__ = ["HasToken", "stale", "token_of"]


class HasToken(Protocol):
    """An object with a token, such as a term."""

    @property
    def token(self) -> int: ...


def token_of(token: int | HasToken) -> int:
    """The number of a token, which is a term, anything else with a `token`, or the number."""
    number = getattr(token, "token", token)
    if type(number) is not int or not 0 <= number < 2**63:
        raise ConfigError(f"a token must be an integer from 0 to 2**63 - 1; got {number!r}")
    return number


def stale(resource: str, token: int, seen: int) -> StaleToken:
    """The error of a resource that has seen a later token."""
    return StaleToken(
        f"{resource!r} refuses token {token}, because it has seen the later token {seen}"
    )
