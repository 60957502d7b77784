"""Immutable values, declared as frozen dataclasses are.

Imports the standard library only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NoReturn, dataclass_transform

__all__ = ["Value", "field"]

_MISSING: Any = object()


class _Field:
    __slots__ = ("compare", "default", "factory", "kind")

    kind: object
    """The annotation, or its text."""

    def __init__(
        self, default: object, factory: Callable[[], object] | None, compare: bool
    ) -> None:
        self.default = default
        self.factory = factory
        self.compare = compare


def field(
    *,
    default: Any = _MISSING,
    default_factory: Callable[[], object] | None = None,
    compare: bool = True,
) -> Any:
    """As `dataclasses.field`, whose module takes a while to import."""
    return _Field(default, default_factory, compare)


@cache
def _dataclass(kind: Any) -> tuple[dict[str, Any], inspect.Signature]:
    """The fields and the signature of a dataclass that is declared as this class is."""
    import dataclasses

    specs = []
    for name, spec in kind._specs.items():
        default = {} if spec.default is _MISSING else {"default": spec.default}
        if spec.factory is not None:
            default = {"default_factory": spec.factory}
        declared: Any = dataclasses.field(compare=spec.compare, **default)
        specs.append((name, spec.kind, declared))
    made: Any = dataclasses.make_dataclass(kind.__name__, specs, kw_only=kind._kw_only)
    return made.__dataclass_fields__, inspect.signature(made)


class _Derived:
    """An attribute of a class that is made when it is read."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __get__(self, value: object, kind: type[Value]) -> Any:
        return self._make(kind)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """The base of immutable values. The annotations of a class are its fields.

    The functions of `dataclasses` accept values. Their classes are not made by `dataclass`, because
    it compiles the methods of each class, which took a third of the time of `import doyen`.

    >>> class Point(Value):
    ...     x: int
    ...     y: int = 0
    >>> Point(1), Point(1) == Point(x=1, y=0)
    (Point(x=1, y=0), True)
    """

    _specs: ClassVar[dict[str, _Field]] = {}
    _kw_only: ClassVar[bool] = False
    __dataclass_fields__: ClassVar[Any] = _Derived(lambda kind: _dataclass(kind)[0])
    __signature__: ClassVar[Any] = _Derived(lambda kind: _dataclass(kind)[1])

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        super().__init_subclass__()
        own: dict[str, _Field] = {}
        for name, kind in cls.__annotations__.items():
            if "ClassVar" in str(kind):  # the annotation, or its text
                continue
            default = vars(cls).get(name, _MISSING)
            own[name] = default if isinstance(default, _Field) else _Field(default, None, True)
            own[name].kind = kind
            if isinstance(default, _Field):
                delattr(cls, name)
        cls._specs = cls._specs | own
        cls._kw_only = cls._kw_only or kw_only
        type.__setattr__(cls, "__match_args__", () if cls._kw_only else tuple(cls._specs))

    def __init__(self, *values: Any, **named: Any) -> None:
        specs = self._specs
        given = dict(zip(specs, values, strict=False)) | named
        twice = len(given) < len(values) + len(named)
        if twice or (values and self._kw_only) or not given.keys() <= specs.keys():
            raise TypeError(f"{self._takes} {values} {named}")
        for name, spec in specs.items():
            if name in given:
                value = given[name]
            elif spec.factory is not None:
                value = spec.factory()
            elif spec.default is not _MISSING:
                value = spec.default
            else:
                raise TypeError(f"{self._takes} no {name!r}")
            object.__setattr__(self, name, value)
        self.__post_init__()

    @property
    def _takes(self) -> str:
        return f"{type(self).__name__}{inspect.signature(type(self))} was given"

    def __post_init__(self) -> None:
        """Check and complete the fields."""

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse(name, "set")

    def __delattr__(self, name: str) -> None:
        self._refuse(name, "deleted")

    def _refuse(self, name: str, change: str) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be {change}: it is final")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name, spec in self._specs.items() if spec.compare)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({fields})"

    def __replace__(self, **changes: Any) -> Any:
        return type(self)(**vars(self) | changes)
