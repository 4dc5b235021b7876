"""Config and capabilities of one rollout engine, independent of roles.

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
    """Folder with config.json and tokenizer; `load_weights` sets the weights."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    max_model_len: int = Field(default=1024, ge=2)
    """Maximum length of prompt plus response in tokens."""
    max_num_seqs: int = Field(default=1024, ge=1)
    """Maximum number of rows in a decode step."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Maximum number of prompt tokens in a prefill; a longer prompt is computed separately."""
    free_cache_engine: bool = True
    """Free the KV cache in `sleep()`."""
    enforce_eager: bool = True
    """Disable CUDA graphs and compilation; vllm, sglang, and torch on a GPU."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks per generator; this and the next three fields apply to vllm and sglang."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of device memory for weights and KV cache."""
    load_format: str = "dummy"
    """`dummy...` starts with uninitialized weights; other formats load the weights of the folder."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of equal prompt prefixes."""
    lora: LoRAConfig | None = None
    """Adapter that is synced separately from the base weights; None: complete weights are synced."""
    update_weights_bucket_megabytes: int = Field(default=512, ge=1)
    """Bucket size of a weight sync to another process."""
    seed: int = 0
    trust_remote_code: bool = False
    external_lib: str | None = None
    override_config: dict[str, Any] = Field(default_factory=dict)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the backend (vllm, sglang, server); 'torch' and 'hf' accept none."""


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
    """Options of a rollout (`rollout.engine_kwargs`). This class accepts any option; the rollout validates them.

    A subclass with fields and `model_config = ConfigDict(extra="forbid")` accepts only these.
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
        """Yield settings that do not fit `world_size` ranks, named as keys of the section `rollout`."""
        return iter(())


@dataclass(frozen=True)
class RolloutCapabilities:
    """Capabilities of a rollout: the class attribute `capabilities` of `BaseRollout`.

        class MyRollout(BaseRollout):
            capabilities = RolloutCapabilities(supports_adapter=True, reads=frozenset({"enforce_eager"}))

    The config checks read it before a process is started.
    """

    options: type[RolloutOptions] = RolloutOptions
    """Schema of `rollout.engine_kwargs`; the default accepts any option."""
    reads: frozenset[str] = frozenset(OPTIONAL_KEYS)
    """The keys of `OPTIONAL_KEYS` that have an effect; a run that sets another one gets a notice."""
    supports_adapter: bool = False
    """Supports `RolloutEngineConfig.lora`: base weights are synced once, the adapter at every weight sync."""
