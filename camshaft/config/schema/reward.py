"""Sections `reward_model` and `custom_reward_function`."""

import os.path
from collections import Counter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from camshaft.config.schema.engine import (
    MicroBatchKeys,
    PooledSection,
    SelectedEngineSection,
)
from camshaft.config.schema.fields import Auto, Count, Functions, Numbers, Path, Section, Text, key, section, unless
from camshaft.config.schema.fsdp import ForwardFSDPConfig
from camshaft.config.schema.model import LoadedModel

SCORES = MicroBatchKeys("forward pass", "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")


class RewardModelModelConfig(LoadedModel):
    key_order = ("path", "input_tokenizer", "external_lib", "fsdp_config")

    input_tokenizer: Path | None = key(
        "${actor_rollout_ref.model.path}",
        "Path of the policy's tokenizer, if the reward model uses a different tokenizer or chat template. Responses "
        "are then decoded to text, and the conversation is formatted with the chat template of the reward model. "
        "null passes the policy's token IDs to the reward model.",
    )
    path: Path = key(
        "~/models/Anomy-RM-v0.1",
        "Hugging Face folder of a sequence-classification model, the URL of one, or the name of one in the local "
        "Hugging Face cache (owner/name).",
    )
    fsdp_config: ForwardFSDPConfig = section(
        "Weight dtype and sharding of the reward model.",
        {"mixed_precision.param_dtype": "${actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype}"},
    )


class OverlongBufferConfig(Section):
    """Soft overlong penalty (DAPO): a penalty that grows linearly as a response approaches the length limit."""

    enable: bool = key(
        False, "Subtract the penalty from the scores of training responses. Validation scores are not penalized."
    )
    len: NonNegativeInt = key(
        0,
        "Length of the penalty interval in tokens, for example a quarter of data.max_response_length. The penalty "
        "grows linearly from 0 to penalty_factor over the last len tokens before the response length limit.",
        unread=unless("enable"),
    )
    penalty_factor: NonNegativeFloat = key(
        1.0, "Penalty of a response that reaches the length limit.", unread=unless("enable")
    )
    log: bool = key(False, "Log the mean penalty and the fraction of penalized responses.", unread=unless("enable"))


class RewardModelConfig(PooledSection, SelectedEngineSection):
    """Reward model that scores complete responses, in addition to a scoring function or instead of it."""

    key_order = ("resource_pool", "enable", "strategy", "model", "ulysses_sequence_parallel_size", "max_length")

    enable: bool = key(
        False,
        "Score responses with a reward model. false uses only the scoring function, and reads only overlong_buffer "
        "of this section.",
    )
    worker_cls: Text | None = key(
        None,
        "Import path package.module:Class of a custom reward worker that implements init_model and compute_rm_score. "
        "null uses the built-in worker.",
    )
    weight: float = key(
        1.0,
        "Weight of the reward model in the score: score = function score + weight * model score. Without a scoring "
        "function (custom_reward_function.name=null), the score is the unweighted model score.",
    )
    model: RewardModelModelConfig = section(
        "Reward model.",
        {
            "download": "${actor_rollout_ref.model.download}",
            "external_lib": "${actor_rollout_ref.model.external_lib}",
            "trust_remote_code": "${actor_rollout_ref.model.trust_remote_code}",
        },
    )
    micro_batch_size: int | None = SCORES.global_size_key(None)
    micro_batch_size_per_gpu: Annotated[int | None, Auto()] = SCORES.size_key()
    use_dynamic_bsz: Annotated[bool, Auto()] = SCORES.dynamic_key("${critic.use_dynamic_bsz}")
    forward_max_token_len_per_gpu: Annotated[int, Auto()] = SCORES.tokens_key("${critic.forward_max_token_len_per_gpu}")
    max_length: Count | None = key(
        None,
        "Maximum sequence length in tokens of the reward model. Longer sequences are truncated on the left, and "
        "their number is logged. null uses prompt length plus response length.",
    )
    overlong_buffer: OverlongBufferConfig = section(
        "Soft penalty for overlong responses (DAPO), applied with or without a reward model."
    )

    def sharding(self) -> ForwardFSDPConfig:
        return self.model.fsdp_config


DEFAULT_FUNCTION = "compute_score"


class RewardFunction(NamedTuple):
    """A selected scoring function."""

    label: str
    """Name in metrics. Empty for a function that is not selected by `custom_reward_function.functions`."""
    path: str | None
    name: str
    kwargs: dict[str, Any]
    weight: float = 1.0


def split_function(text: str) -> tuple[str | None, str | None]:
    """Return path and name of a function: a file, a function of a file, or the name of a function without a file."""
    path, colon, function = text.rpartition(":")
    if colon and path.endswith(".py"):
        return path, function
    return (text, None) if text.endswith(".py") or "/" in text else (None, text)


class CustomRewardConfig(Section):
    """Selection of the scoring function, and settings that apply to every scoring function."""

    path: Path | None = key(
        None,
        "Python file or module that defines the scoring function. null selects a built-in function.",
        short=("reward", "file.py, file.py:function, or a built-in function; or a list"),
    )
    name: Text | None = key(
        DEFAULT_FUNCTION,
        "Name of the function, or the name it is registered under with @register_reward, such as gsm8k or "
        "exact_match. Without a path, compute_score selects a built-in function by data source. null means "
        "compute_score if path is set; otherwise it disables scoring functions in camshaft generate and in runs with "
        "a reward model.",
    )
    functions: Functions = key(
        [],
        "Several scoring functions instead of path and name, for example [format.py, math.py:score]. The score is "
        "their weighted sum, and each of them has metrics reward/<function>/mean, ...",
    )
    weights: Numbers = key(
        [],
        "Weight of each function in functions. An empty list means a weight of 1 for each.",
        short=("reward_weights", "weight of each function in reward"),
    )
    reward_kwargs: dict[str, Any] = key(
        {},
        "Additional keyword arguments passed to every call of the function. With functions, a mapping of arguments "
        "for each function.",
    )
    batched: bool | None = key(
        None,
        "Call the function once per batch with the lists data_sources, solution_strs, ground_truths and extra_infos. "
        "null detects a batched function by its parameter names.",
    )
    max_abs_score: PositiveFloat = key(
        1e6, "Largest valid absolute value of a score. A sample whose score exceeds it counts as failed."
    )
    timeout: PositiveFloat = key(30.0, "Time limit of one call in seconds.")
    load_timeout: PositiveFloat = key(120.0, "Time limit, in seconds, for importing the function in a scoring process.")
    num_workers: Count = key(2, "Number of processes that run the scoring functions.")
    max_concurrency: Count = key(
        32, "Number of calls of async functions that run at the same time, over all processes."
    )
    on_error: Literal["zero", "drop", "raise"] = key(
        "zero",
        "Handling of a sample whose call fails or times out: zero scores it 0, drop excludes it from the update, "
        "raise stops the run. Validation, camshaft generate and camshaft eval treat drop as zero.",
    )

    def is_named(self) -> bool:
        """Return True if a scoring function is configured."""
        return self.path is not None or self.name is not None or bool(self.functions)

    def is_chosen(self) -> bool:
        """Return True if a scoring function is configured other than by default."""
        return self.is_named() and (self.path is not None or bool(self.functions) or self.name != DEFAULT_FUNCTION)

    def selected(self) -> tuple[RewardFunction, ...]:
        """Return the functions to load.

        Without a path, the default name is replaced by "auto", the function that selects a built-in one by
        `data_source`. In metrics, a function has its name, or that of its file if no function of it is named. The name
        of its file or module is added to names that occur several times.
        """
        if not self.functions:
            return (RewardFunction("", self.path, _name(self.path, self.name), self.reward_kwargs),)
        parts = [split_function(text) for text in self.functions]
        labels = [_short_label(path, name) for path, name in parts]
        counts = Counter(labels)
        functions: list[RewardFunction] = []
        for index, (path, name) in enumerate(parts):
            label = labels[index] if counts[labels[index]] == 1 else _long_label(path, name)
            weight = self.weights[index] if index < len(self.weights) else 1.0
            functions.append(RewardFunction(label, path, _name(path, name), self.reward_kwargs.get(label, {}), weight))
        return tuple(functions)


def _name(path: str | None, name: str | None) -> str:
    name = name or DEFAULT_FUNCTION
    return "auto" if path is None and name == DEFAULT_FUNCTION else name


def _short_label(path: str | None, name: str | None) -> str:
    return (name or "").rpartition(":")[2] or os.path.basename(path or "").removesuffix(".py")


def _long_label(path: str | None, name: str | None) -> str:
    source = os.path.basename(path).removesuffix(".py") if path else (name or "").rpartition(":")[0].rpartition(".")[2]
    return ".".join(part for part in (source, _short_label(None, name) if name else "") if part)
