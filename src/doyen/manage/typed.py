"""The types of configurations: how a value becomes JSON, and how it is checked when it is read.

A configuration without a type takes whatever JSON can represent. Otherwise the type is one of
msgspec (a Struct, a dataclass, a TypedDict, `dict[str, int]`, …) or of pydantic (a model, or a
`TypeAdapter`). Both are optional: they are imported when a type needs them.

A value is encoded, and what was encoded is decoded again, before it is written. So a writer never
writes what a reader with the same type would refuse.

A type may have code of the user, such as the validators of pydantic. Whatever `Exception` it raises
is a refusal of the value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from doyen.errors import ConfigError
from doyen.model import encode_json

__all__ = ["TypeRefused", "Typed", "typed"]

T = TypeVar("T")


class TypeRefused(ValueError):
    """A value is not of the type. The message has the path of the part that is not, and why."""


class Typed(NamedTuple, Generic[T]):
    """A type of documents. Both functions raise `TypeRefused`."""

    encode: Callable[[Any], bytes]
    """From a value to JSON text."""
    decode: Callable[[bytes], T]
    """From JSON text to a value of the type."""
    may_block: bool = True
    """It may have code of the user, which must not run on doyen's loop."""

    def to_json(self, value: Any) -> tuple[Any, T]:
        """The value as plain JSON, which is what is written, and as readers will get it."""
        text = self.encode(value)
        return json.loads(text), self.decode(text)

    def from_json(self, value: Any) -> T:
        """A value of the type, from plain JSON."""
        return self.decode(encode_json(value))


def typed(kind: Any) -> Typed[Any]:
    """The functions for a type; `kind` None means any JSON."""
    if kind is None:
        return Typed(_plain_encode, json.loads, may_block=False)
    if hasattr(kind, "__pydantic_validator__") or hasattr(kind, "validate_json"):
        return _refusing(_by_pydantic(kind))
    try:
        import msgspec
    except ModuleNotFoundError:
        return _by_instance(kind)
    return _refusing(_by_msgspec(kind, msgspec))


def _refusing(kind: Typed[Any]) -> Typed[Any]:
    """Whatever its code raises is a refusal."""

    def refusing(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def called(argument: Any) -> Any:
            try:
                return call(argument)
            except TypeRefused:
                raise
            except Exception as error:
                raise TypeRefused(f"its type raised {error!r}") from error

        return called

    return Typed(refusing(kind.encode), refusing(kind.decode))


def _plain_encode(value: Any) -> bytes:
    try:
        return encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeRefused(
            f"it is not what JSON can represent: {error}; pass type= for values of a class"
        ) from error


def _by_msgspec(kind: Any, msgspec: Any) -> Typed[Any]:
    try:
        decoder = msgspec.json.Decoder(kind)
    except TypeError as error:
        raise ConfigError(f"type={kind!r} is not a type that msgspec can check: {error}") from error

    def encode(value: Any) -> bytes:
        try:
            encoded: bytes = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeRefused(f"it is not what JSON can represent: {error}") from error
        return encoded

    def decode(text: bytes) -> Any:
        try:
            return decoder.decode(text)
        except msgspec.DecodeError as error:  # ValidationError is one
            raise TypeRefused(_msgspec_reason(str(error))) from error

    return Typed(encode, decode)


def _msgspec_reason(text: str) -> str:
    """
    >>> _msgspec_reason("Expected `int`, got `str` - at `$.port`")
    '$.port: Expected `int`, got `str`'
    >>> _msgspec_reason("Expected `object`, got `int`")
    '$: Expected `object`, got `int`'
    """
    reason, at, path = text.rpartition(" - at ")
    return f"{path.strip('`')}: {reason}" if at else f"$: {text}"


def _by_pydantic(kind: Any) -> Typed[Any]:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import PydanticSerializationError

    adapter: Any = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)

    def refuse(error: ValidationError) -> TypeRefused:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        return TypeRefused(f"${path}: {first['msg']}")

    def encode(value: Any) -> bytes:
        try:
            valid = adapter.validate_python(value)
            encoded: bytes = adapter.dump_json(valid)
        except ValidationError as error:
            raise refuse(error) from error
        except PydanticSerializationError as error:
            raise TypeRefused(f"it is not what JSON can represent: {error}") from error
        # A SecretStr is dumped as asterisks, and a field with an alias under its own name.
        was, becomes = (
            adapter.dump_python(each, round_trip=True) for each in (valid, decode(encoded))
        )
        if was != becomes:
            raise TypeRefused(
                "readers would get another value than this one, because the type does not decode"
                " what it encodes, as with SecretStr or an alias: give the field a serializer"
            )
        return encoded

    def decode(text: bytes) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError as error:
            raise refuse(error) from error

    return Typed(encode, decode)


def _by_instance(kind: Any) -> Typed[Any]:
    """Without msgspec, a type that JSON has itself is checked by `isinstance`."""
    if kind not in (dict, list, str, int, float, bool):
        raise ConfigError(
            f"type={kind!r} needs msgspec or pydantic: pip install msgspec, or leave the type out"
        )

    def decode(text: bytes) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeRefused(f"$: Expected `{kind.__name__}`, got `{type(value).__name__}`")
        return value

    return Typed(_plain_encode, decode, may_block=False)
