"""What the sections of the config are made of: the base class, the shared kinds of value, and their words.

A section is a class of `Section`; a key is an annotated attribute with `Field(description=...)` and no
default (defaults live in the YAML files). `describe(field)` puts type and bounds into words, which
errors and `camshaft config explain` both use.

    class KLCtrlConfig(Section):
        kl_coef: float = Field(ge=0, description="Weight of the KL penalty.")
"""

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

from camshaft.config.engine import Frozen


class Section(Frozen):
    """Frozen, closed, and strict: `"8"` is not 8, `true` is not 1, and no number is infinite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Says:
    """The words for a kind of value that its Python type does not tell."""

    text: str


@dataclass(frozen=True)
class IsPath:
    """Marks a key that names a file or a folder (see `not_yet.py` for the file systems)."""


def _as_text(value: Any) -> Any:
    """Names such as `experiment_name=7` arrive as numbers from the command line."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _local(value: str) -> str:
    """`file://` names what is on this machine; `~` is the user's folder."""
    return os.path.expanduser(value.removeprefix("file://"))


def _all_local(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_local, values))


def _joined(value: Any) -> Any:
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    return value


def _off_or_positive(value: int) -> int:
    if value == -1 or value >= 1:
        return value
    raise ValueError("neither -1 nor positive")


Text = Annotated[str, BeforeValidator(_as_text)]
Path = Annotated[str, BeforeValidator(_as_text), AfterValidator(_local), IsPath(), Says("a path")]
Paths = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_tuple),
    AfterValidator(_all_local),
    IsPath(),
    Says("a path or a list of paths"),
]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Says("a list of names")]
Contents = Annotated[
    tuple[Literal["model", "optimizer", "extra", "hf_model"], ...],
    BeforeValidator(_as_tuple),
    Says("a list of model, optimizer, extra, hf_model"),
]
Modules = Annotated[str, BeforeValidator(_joined), Says("a module, or several with commas between")]
OffOrPositive = Annotated[int, AfterValidator(_off_or_positive), Says("-1 (off), or a whole number of 1 or more")]
Betas = Annotated[
    tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]],
    BeforeValidator(_as_tuple),
    Says("two numbers, each 0 or more and below 1"),
]
DType = Literal["float32", "bfloat16", "float64"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLPenalty = Literal["kl", "abs", "mse", "low_var_kl", "full"]


def describe(field: FieldInfo) -> str:
    """Type, bounds and allowed values of a key in words: 'a whole number of 1 or more, or null'."""
    return _describe(field.annotation, field.metadata)


def is_path(field: FieldInfo) -> bool:
    """Whether the key names files or folders."""
    parts = [*field.metadata]
    for part in get_args(field.annotation):
        parts.extend(get_args(part))
    return any(isinstance(part, IsPath) for part in parts)


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    for mark in metadata:
        if isinstance(mark, Says):
            return mark.text
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        return _describe(inner, [*marks, *metadata])
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        words = ", or ".join(_describe(kind, metadata) for kind in kinds)
        return words if len(kinds) == len(get_args(annotation)) else f"{words}, or null"
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    plain = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    return plain.get(annotation, "a section with keys of your own") + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    words = []
    for mark in metadata:
        if isinstance(mark, Ge):
            words.append(f"of {mark.ge} or more")
        elif isinstance(mark, Gt):
            words.append(f"above {mark.gt}")
        elif isinstance(mark, Le):
            words.append(f"at most {mark.le}")
        elif isinstance(mark, Lt):
            words.append(f"below {mark.lt}")
    return (" " + " and ".join(words)) if words else ""
