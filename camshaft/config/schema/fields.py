"""Building blocks of the config schema: the base class of sections, keys, and the value types that sections share.

A section of the config is a subclass of `Section`. A key is an attribute with its default and its description. A
section that stands at several places can have other defaults at one of them, which the enclosing section gives.

    class KLCtrlConfig(Section):
        kl_coef: float = key(0.005, "Weight of the KL penalty.", ge=0)

    class AlgorithmConfig(Section):
        use_kl_in_reward: bool = key(False, "Subtract the KL penalty from the reward.")
        kl_ctrl: KLCtrlConfig = section(
            "Coefficient of the KL penalty.", {"kl_coef": 0.001}, unread=unless("use_kl_in_reward")
        )

`describe(field)` formats the type and the bounds of a key for error messages and `camshaft config explain`.
"""

import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic.fields import FieldInfo

from camshaft.config.engine import Frozen
from camshaft.config.guards import is_list

if TYPE_CHECKING:
    from camshaft.config.errors import Problem

AUTO = "auto"
"""Value of a key that is chosen automatically."""


class Section(Frozen):
    """Base class of all sections.

    Sections are frozen, reject unknown keys, NaN and infinite numbers, and do not convert types (`"8"` is not 8).
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    key_order: ClassVar[tuple[str, ...]] = ()
    """Keys in the order of the generated pages, if inherited keys stand between the keys of the class. A key that is
    not listed follows its predecessor in the class."""

    def problems(self) -> Iterator["Problem"]:
        """Yield the problems that values of this section have with each other.

        Keys are relative to the section. In a message, `[name]` stands for the complete key.
        """
        return iter(())


@dataclass(frozen=True)
class Unread:
    """Condition under which nothing reads a key, which depends on other keys of the same section."""

    test: Callable[[Any], bool]
    """Predicate on the section."""
    cause: str
    """Settings that cause it, completing the sentence "has no effect with ...", or a clause that starts with because.
    `{name}` stands for a key of the section and its value."""
    fix: str = "omit the key"
    """What to do instead. `[name]` stands for a key of the section."""
    harmless: tuple[Any, ...] = ()
    """Values that describe what the run does anyway. Setting them is not reported."""


@cache
def unless(switch: str, harmless: tuple[Any, ...] = ()) -> Unread:
    """Return the condition of a key that nothing reads if `switch` is false."""
    fix = f"set [{switch}]=true, or omit the key"
    return Unread(lambda section: not getattr(section, switch), f"{{{switch}}}", fix, harmless)


@dataclass(frozen=True)
class ShortName:
    """Short name of a key. If keys of several sections have it, it is that of the first one."""

    name: str
    values: str
    """Description of the values for help texts."""


@dataclass(frozen=True)
class Alias:
    """Deprecated name of a key in the same section."""

    name: str


@dataclass(frozen=True)
class DifferingDefaults:
    """Defaults of keys in a section that differ at one place of the section."""

    values: Mapping[str, Any]


Mark = TypeVar("Mark", Unread, ShortName, Alias, DifferingDefaults)


def marks(field: FieldInfo, kind: type[Mark]) -> list[Mark]:
    """Return the marks of one kind that `key` or `section` has attached to a field."""
    return [mark for mark in field.metadata if isinstance(mark, kind)]


def key(
    default: Any,
    description: str,
    *,
    unread: Unread | Sequence[Unread] = (),
    short: str | tuple[str, str] | None = None,
    alias: str | None = None,
    **bounds: Any,
) -> Any:
    """Declare a key. The default can refer to another key, such as `${trainer.seed}`.

    Nothing reads the key under the conditions `unread`. `short` is a short name, if wanted with a description of its
    values. `alias` is a deprecated name of the key in the same section.
    """
    field = Field(default, description=description, **bounds)
    field.metadata += [unread] if isinstance(unread, Unread) else unread
    if short is not None:
        name, values = (short, description.partition(".")[0]) if isinstance(short, str) else short
        field.metadata.append(ShortName(name, values))
    if alias is not None:
        field.metadata.append(Alias(alias))
    return field


def section(
    description: str,
    defaults: Mapping[str, Any] | None = None,
    *,
    unread: Unread | None = None,
    **options: Any,
) -> Any:
    """Declare a section. `defaults` contains the defaults that its keys, which may be dotted, have at this place.

    Nothing reads the keys of the section under the condition `unread`.
    """
    field = Field(description=description, **options)
    field.metadata.append(DifferingDefaults(defaults or {}))
    field.metadata += [] if unread is None else [unread]
    return field


@dataclass(frozen=True)
class Choice:
    """The value of a key that is `auto`, as `camshaft.config.auto` chose it."""

    key: str
    value: Any
    reason: str
    awaits_data: bool = False
    """True if the value is the largest for any data, until `fit_to_prompts` takes it from the data of the run."""


class CommandConfig(Section):
    """Base class of the configs of commands. They record which values were chosen automatically."""

    _choices: tuple[Choice, ...] = PrivateAttr(default=())

    def choices(self) -> tuple[Choice, ...]:
        """Return the values that were chosen automatically."""
        return self._choices

    def is_automatic(self, key: str) -> bool:
        """Return True if the value of a key was chosen automatically."""
        return any(choice.key == key for choice in self._choices)

    def with_choices(self, choices: Sequence[Choice]) -> Self:
        """Return a copy that records the given choices."""
        config = self.model_copy()
        config._choices = tuple(choices)
        return config

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the values, with `auto` for those that await the data. A loaded copy then takes them from its data."""
        values = handler(self)
        for choice in self._choices:
            *names, name = choice.key.split(".")
            section = reduce(lambda section, part: section.get(part, {}), names, values)
            if choice.awaits_data and name in section:
                section[name] = AUTO
        return values


@dataclass(frozen=True)
class Auto:
    """Marker of a key that accepts `auto`. Loading a config replaces it with a value of the type (`config/auto`)."""


@dataclass(frozen=True)
class Described:
    """Description of the allowed values, for keys whose Python type is not specific enough."""

    text: str


@dataclass(frozen=True)
class IsPath:
    """Marker of a key whose value is a path. `REMOTE_PATHS` in `load.py` lists the keys that also accept URLs."""


def _as_text(value: Any) -> Any:
    """Convert a number to a string, because the command line parses `experiment_name=7` as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str | int | float):
        return (value,)
    return tuple(value) if is_list(value) else value


def _local(value: str) -> str:
    """Remove a `file://` prefix and expand `~`."""
    if not value:
        raise ValueError("must not be empty")
    return os.path.expanduser(value.removeprefix("file://"))


def _all_local(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_local, values))


def _join_list(value: Any) -> Any:
    if is_list(value) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    return value


def _off_or_positive(value: int) -> int:
    if value == -1 or value >= 1:
        return value
    raise ValueError("must be -1 or positive")


Count = Annotated[int, Ge(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]
Text = Annotated[str, BeforeValidator(_as_text)]
Path = Annotated[str, BeforeValidator(_as_text), AfterValidator(_local), IsPath(), Described("a path")]
_LocalPaths = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), AfterValidator(_all_local), IsPath()]
Paths = Annotated[_LocalPaths, Described("a path or a list of paths")]
Functions = Annotated[_LocalPaths, Described("a list of file.py, file.py:function, and names of functions")]
Environments = Annotated[
    _LocalPaths, Described("file.py:Class, package.module:Class, an entry point, or a list of them")
]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_tuple), Described("a list of numbers")]
TokenIDs = Annotated[tuple[Annotated[int, Ge(0)], ...], BeforeValidator(_as_tuple), Described("a list of token IDs")]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Described("a list of names")]
Contents = Annotated[
    tuple[Literal["model", "optimizer", "extra", "hf_model"], ...],
    BeforeValidator(_as_tuple),
    Described("a list of model, optimizer, extra, hf_model"),
]
Modules = Annotated[
    str, BeforeValidator(_join_list), Described("a module name, or a comma-separated list of module names")
]
Frequency = Annotated[
    Literal["auto"] | Annotated[int, AfterValidator(_off_or_positive)], Described("auto, -1, or an integer >= 1")
]
OffOrPositive = Annotated[int, AfterValidator(_off_or_positive), Described("-1, or an integer >= 1")]
Betas = Annotated[
    tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]],
    BeforeValidator(_as_tuple),
    Described("two numbers, each >= 0 and < 1"),
]
DType = Literal["float32", "bfloat16", "float64"]
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]  # fmt: skip
KLPenalty = Literal["kl", "abs", "mse", "low_var_kl", "full", "kl+", "abs+", "low_var_kl+"]
_K_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def _penalty_name(value: Any) -> Any:
    """Accept k1, k2 and k3 as names of estimators. The gradient of `mse` is that of `mse+` already."""
    if not isinstance(value, str):
        return value
    name, plus = value.removesuffix("+"), "+" * value.endswith("+")
    name = _K_NAMES.get(name, name)
    return name if name == "mse" else name + plus


KLPenaltyName = Annotated[KLPenalty, BeforeValidator(_penalty_name)]


def describe(field: FieldInfo) -> str:
    """Describe the type, bounds and allowed values of a key, for example 'an integer >= 1, or null'."""
    description = _describe(field.annotation, field.metadata)
    return f"auto, or {description}" if accepts_auto(field) else description


def accepts_auto(field: FieldInfo) -> bool:
    """Return True if the value of the key can be `auto`."""
    return any(isinstance(mark, Auto) for mark in field.metadata)


def is_path(field: FieldInfo) -> bool:
    """Return True if the value of the key is a path or a list of paths."""
    parts = [*field.metadata]
    for part in get_args(field.annotation):
        parts.extend(get_args(part))
    return any(isinstance(part, IsPath) for part in parts)


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    for mark in metadata:
        if isinstance(mark, Described):
            return mark.text
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        return _describe(inner, [*marks, *metadata])
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        alternatives = ", or ".join(_describe(kind, metadata) for kind in kinds)
        return alternatives if len(kinds) == len(get_args(annotation)) else f"{alternatives}, or null"
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    names = {bool: "true or false", str: "a string", int: "an integer", float: "a number"}
    return names.get(annotation, "a mapping") + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    bounds: list[str] = []
    for mark in metadata:
        if isinstance(mark, Ge):
            bounds.append(f">= {mark.ge}")
        elif isinstance(mark, Gt):
            bounds.append(f"> {mark.gt}")
        elif isinstance(mark, Le):
            bounds.append(f"<= {mark.le}")
        elif isinstance(mark, Lt):
            bounds.append(f"< {mark.lt}")
    return (" " + " and ".join(bounds)) if bounds else ""
