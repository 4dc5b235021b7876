"""Config of one rollout engine, free of roles, and its capabilities.

    RolloutEngineConfig(model_path="models/tiny", max_model_len=256)

A rollout declares what it supports in `RolloutCapabilities` and its options in a subclass of `RolloutOptions`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from camshaft.config.engine import Conflict, Frozen, LoRAConfig, invalid_options


class RolloutEngineConfig(Frozen):
    """Model, memory and device of one generator."""

    model_path: str
    """Folder with config.json and tokenizer; weights come through `load_weights`."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    max_model_len: int = Field(default=1024, ge=2)
    """Prompt plus response, at most."""
    max_num_seqs: int = Field(default=1024, ge=1)
    """Rows decoded together, at most."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens computed together, at most (one longer prompt goes alone)."""
    free_cache_engine: bool = True
    """Free the memory of keys and values in `sleep()`."""
    enforce_eager: bool = True
    """Without CUDA graphs and compilation; for vllm, sglang, and torch on a GPU."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that are one generator; this and the next three are for vllm and sglang."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the device's memory for weights, keys and values."""
    load_format: str = "dummy"
    """`dummy...`: start without reading weights; anything else reads those of the folder first."""
    enable_prefix_caching: bool = True
    """Compute equal beginnings of prompts once."""
    lora: LoRAConfig | None = None
    """An adapter that comes by itself, beside base weights that came before; None: weights come whole."""
    update_weights_bucket_megabytes: int = Field(default=512, ge=1)
    """Weights for another process go in buckets of this size."""
    seed: int = 0
    trust_remote_code: bool = False
    external_lib: str | None = None
    override_config: dict[str, Any] = Field(default_factory=dict)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For generators that are libraries of their own (vllm, sglang); 'torch' and 'hf' take none."""


OPTIONAL_KEYS = (
    "tensor_model_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
    "load_format",
    "enable_prefix_caching",
    "update_weights_bucket_megabytes",
)
"""Keys of the section `rollout` that not every rollout reads."""


class RolloutOptions(Frozen):
    """Options of a rollout (`rollout.engine_kwargs`). This class accepts every option, for the rollout to check.

    A subclass with fields and `model_config = ConfigDict(extra="forbid")` accepts these alone.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def of(cls, options: Mapping[str, Any], world_size: int = 1) -> Self:
        """Validate `options`; a `ValueError` lists every error."""
        errors = invalid_options(cls, options)
        if errors:
            raise ValueError("; ".join(f"{error.option}: {error.message}" for error in errors))
        return cls.model_validate(options)

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        """Settings that do not fit `world_size` ranks, named as keys of the section `rollout`."""
        return iter(())


@dataclass(frozen=True)
class RolloutCapabilities:
    """What a rollout supports: the class attribute `capabilities` of `BaseRollout`.

        class MyRollout(BaseRollout):
            capabilities = RolloutCapabilities(takes_adapter=True, reads=frozenset({"enforce_eager"}))

    The config checks read it before a process is started.
    """

    options: type[RolloutOptions] = RolloutOptions
    """Schema of `rollout.engine_kwargs`; the default accepts every option."""
    reads: frozenset[str] = frozenset(OPTIONAL_KEYS)
    """The keys of `OPTIONAL_KEYS` that have an effect; a run that sets another one gets a notice."""
    takes_adapter: bool = False
    """Generates with `RolloutEngineConfig.lora`: base weights once, and the adapter at every weight sync."""
