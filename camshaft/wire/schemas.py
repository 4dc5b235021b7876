"""JSON bodies of the requests of the Tinker API, and of two answers.

    step, ignored = read(OptimStep, json.loads(body))
    step.adam_params.learning_rate
    ignored                                   # names of fields that this version does not know, such as adam_params.nu

A newer SDK may send fields that this version does not know. They are left out and named, so that the caller can decide
whether to report them. Integers have 64 bits, and those with narrower limits are annotated with them.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class InvalidBody(ValueError):
    """A body that lacks a field, or has one of another type."""


class OutOfRange(InvalidBody):
    """An integer that is too small or too large."""


INTEGERS = range(-(2**63), 2**63)
"""Integers that the log of the server and tensors can store."""
Number = Annotated[int, range(10**9)]
"""Number of a model or of a sampler in its session, which is a part of paths and ids."""


@dataclass(frozen=True)
class CreateSession:
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


@dataclass(frozen=True)
class OfSession:
    session_id: str


@dataclass(frozen=True)
class OfModel:
    model_id: str


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class OptimizerSettings:
    type: str = "adam"


@dataclass(frozen=True)
class CreateModel:
    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerSettings | None = None
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class AdamSettings:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class OptimStep:
    model_id: str
    seq_id: int
    adam_params: AdamSettings | None = None
    optimizer_params: dict[str, Any] | None = None


@dataclass(frozen=True)
class SaveWeights:
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class SaveWeightsExternal:
    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


@dataclass(frozen=True)
class LoadWeights:
    path: str
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    optimizer: bool = False
    base_model: str | None = None
    optimizer_config: OptimizerSettings | None = None
    weights_access_token: str | None = None
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class SaveWeightsForSampler:
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class CreateSamplingSession:
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


@dataclass(frozen=True)
class PromptChunk:
    type: str
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Prompt:
    chunks: list[PromptChunk]


@dataclass(frozen=True)
class SampleSettings:
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class TokenTable:
    """Token ids of shape (rows, columns), all of them or, with the indices of CSR, those of some cells."""

    data: list[int]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


@dataclass(frozen=True)
class Sample:
    prompt: Prompt
    sampling_params: SampleSettings
    sampling_session_id: str
    seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    target_prompt_logprobs: TokenTable | None = None
    prompt_alt_tokens_k: int | None = None
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


@dataclass(frozen=True)
class RetrieveFuture:
    request_id: str
    allow_metadata_only: bool = False


@dataclass(frozen=True)
class FinishSession:
    reason: dict[str, Any] | None = None
    detail: str | None = None


@dataclass(frozen=True)
class WeightsInfo:
    tinker_path: str


@dataclass(frozen=True)
class SetTtl:
    ttl_seconds: int | None = None


# -- answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
    """Answer to get_info."""

    model_id: str
    model_data: dict[str, str]
    is_lora: bool
    lora_rank: int
    model_name: str
    type: str = "get_info"


@dataclass(frozen=True)
class TrainingRun:
    """Entry of training_runs. The checkpoints are the last ones of each type."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int | None
    last_request_time: str
    last_checkpoint: dict[str, Any] | None
    last_sampler_checkpoint: dict[str, Any] | None


@dataclass(frozen=True)
class SavedInfo:
    """Answer to weights_info."""

    base_model: str
    is_lora: bool
    lora_rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


def read(schema: type[T], body: Any, name: str = "") -> tuple[T, list[str]]:
    """Return the body as an instance of the schema, and the names of the fields that the schema does not have.

    A field whose value is null has its default. Raise `InvalidBody` if a field is missing or has another type.
    """
    if not isinstance(body, Mapping):
        raise InvalidBody(f"{name or 'the body'} must be a JSON object, got {_describe(body)}")
    prefix = f"{name}." if name else ""
    hints, values = _type_hints(schema), dict[str, Any]()
    ignored = [f"{prefix}{key}" for key in body if key not in hints and key != "type"]  # the kind of the body
    for each in fields(schema):  # pyright: ignore[reportArgumentType]
        value = body.get(each.name)
        if value is not None:
            values[each.name] = _convert(hints[each.name], value, f"{prefix}{each.name}", ignored)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise InvalidBody(f"{prefix}{each.name} is missing; {schema.__name__} requires it")
    return schema(**values), ignored


@cache
def _type_hints(schema: type[Any]) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _convert(kind: Any, value: Any, name: str, ignored: list[str]) -> Any:
    """Return the value of a field with its type. Append the names of unknown fields inside it to `ignored`."""
    if kind is Any:
        return value
    if is_dataclass(kind):
        converted, unknown = read(kind, value, name)  # pyright: ignore[reportArgumentType]
        ignored += unknown
        return converted
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        options = [option for option in arguments if option is not NoneType]
        for option in options:
            try:
                return _convert(option, value, name, ignored)
            except InvalidBody as error:
                if len(options) == 1 or isinstance(error, OutOfRange):
                    raise
    elif origin is Annotated:
        return _in_range(_convert(arguments[0], value, name, ignored), name, arguments[1])
    elif origin is list and isinstance(value, list):
        if _is_plain(arguments[0], value):
            return value
        return [_convert(arguments[0], entry, f"{name}[{index}]", ignored) for index, entry in enumerate(value)]
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
        raise InvalidBody(f"{name} must be a finite number, got {_describe(value)}")
    elif kind is int and type(value) is int:
        return _in_range(value, name, INTEGERS)
    elif isinstance(kind, type) and type(value) is kind:
        return value
    raise InvalidBody(f"{name} must be {_format_type(kind)}, got {_describe(value)}")


def _is_plain(kind: Any, entries: list[Any]) -> bool:
    """Return True for texts and for integers in their range, which need no conversion. Prompts are long."""
    if kind not in (int, str) or not all(type(entry) is kind for entry in entries):
        return False
    return kind is str or not entries or (min(entries) in INTEGERS and max(entries) in INTEGERS)


def _in_range(value: int, name: str, valid: range) -> int:
    if value not in valid:
        raise OutOfRange(f"{name} must be an integer from {valid[0]} to {valid[-1]}, got {_describe(value)}")
    return value


def _format_type(kind: Any) -> str:
    names = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _format_type(arguments[0])
    if origin in (UnionType, Union):
        return " or ".join(_format_type(option) for option in arguments if option is not NoneType)
    if origin is list:
        return f"a list, each entry {_format_type(arguments[0])}"
    return names.get(kind, "a JSON object")


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def field_names(schema: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields that a schema knows."""
    return tuple(_type_hints(schema))
