"""Config, options and capabilities of a rollout backend.

    RolloutEngineConfig(model_path="models/tiny", max_model_len=256)

A rollout class declares its features in `RolloutCapabilities`, and its options in a subclass of `RolloutOptions`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from camshaft.config.engine import Conflict, Frozen, LoRAConfig, invalid_options


class RolloutEngineConfig(Frozen):
    """Model, memory limits and device of a rollout backend."""

    model_path: str
    """Hugging Face model folder with config.json and tokenizer. `load_weights` sets the weights."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    max_model_len: int = Field(default=1024, ge=2)
    """Maximum sequence length (prompt and response together) in tokens."""
    max_num_seqs: int = Field(default=1024, ge=1)
    """Maximum number of sequences per decode step."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Maximum number of prompt tokens per prefill step. A longer prompt is computed in a separate step."""
    free_cache_engine: bool = True
    """Free the KV cache in `sleep()`."""
    enforce_eager: bool = True
    """Run the model eagerly, without CUDA graphs and compilation (vllm, sglang, and torch on a GPU)."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Tensor-parallel size. Like the next three fields, it applies to vllm and sglang only."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of device memory for weights and KV cache."""
    load_format: str = "dummy"
    """With a format whose name begins with `dummy`, the weights are uninitialized; with others, they are loaded."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes."""
    lora: LoRAConfig | None = None
    """LoRA adapter that is synced separately from the base weights. None syncs complete weights."""
    enable_return_routed_experts: bool = False
    """Return the experts that a mixture of experts chose for each token. Requires `supports_routed_experts`."""
    update_weights_bucket_megabytes: int = Field(default=512, ge=1)
    """Size in megabytes of the buckets in which weights are sent to another process."""
    seed: int = 0
    trust_remote_code: bool = False
    external_lib: str | None = None
    override_config: dict[str, Any] = Field(default_factory=dict)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the rollout class (vllm, sglang, server). `RolloutCapabilities.options` validates them."""


OPTIONAL_KEYS = (
    "tensor_model_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
    "load_format",
    "enable_prefix_caching",
    "update_weights_bucket_megabytes",
    "free_cache_engine",
)
"""Keys of the section `rollout` that some rollouts ignore."""


OPTIONAL_SAMPLING = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling parameters that some rollouts do not support, with the value that has no effect."""


class RolloutOptions(Frozen):
    """Options of a rollout (`rollout.engine_kwargs`).

    This class accepts any option, and the rollout has to validate them. A subclass that declares fields and
    `model_config = ConfigDict(extra="forbid")` accepts only these fields.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], world_size: int = 1) -> Self:
        """Validate `options` and return an instance; a `ValueError` lists all invalid options."""
        errors = invalid_options(cls, options)
        if errors:
            raise ValueError("; ".join(f"{error.option}: {error.message}" for error in errors))
        return cls.model_validate(options)

    def conflicts(self, tensor_parallel_size: int, world_size: int) -> Iterator[Conflict]:
        """Yield settings that are incompatible with `world_size` ranks, under their names in the section `rollout`."""
        return iter(())

    @classmethod
    def uses_library(cls, options: Mapping[str, Any]) -> bool:
        """Return True if the rollout imports `RolloutCapabilities.library` with these options."""
        return True

    @classmethod
    def ignored_keys(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the keys of the section `rollout` that the rollout ignores with these options."""
        return frozenset()


@dataclass(frozen=True)
class RolloutCapabilities:
    """Features of a rollout, declared in the class attribute `capabilities` of `BaseRollout`.

        class MyRollout(BaseRollout):
            capabilities = RolloutCapabilities(supports_adapter=True, reads=frozenset({"enforce_eager"}))

    The config checks read it on the driver before any process is started.
    """

    options: type[RolloutOptions] = RolloutOptions
    """Schema of `rollout.engine_kwargs`. The default accepts any option."""
    reads: frozenset[str] = frozenset(OPTIONAL_KEYS)
    """Keys of `OPTIONAL_KEYS` that the rollout reads. A run that sets one of the other keys logs a warning."""
    sampling: frozenset[str] = frozenset()
    """Parameters of `OPTIONAL_SAMPLING` that the rollout applies. Its log-probs must refer to the resulting
    distribution. The other parameters are rejected."""
    accelerator_keys: frozenset[str] = frozenset()
    """Keys in `reads` that have no effect on a CPU."""
    library: str | None = None
    """Optional library that the rollout requires. A run without it is rejected before it loads anything."""
    wraps: str | None = None
    """Rollout to which this one passes its config, unless `engine_kwargs.rollout` selects another. The keys that either
    of them reads are read."""
    continues_rows: bool = False
    """True if a row that is interrupted and continued (`generated`) has the tokens of an uninterrupted one, because its
    random numbers depend only on seed and position. Others draw the new tokens with another seed, and reject presence
    and frequency penalties and stop strings in continued rows."""
    keeps_rows: bool = False
    """True if `generate_sequences` accepts `row_ids`, and computes of a row only the tokens that an earlier call with
    the same id has not computed. `close_rows` and new weights end this."""
    scores_prompts: bool = False
    """True if the rollout supports `score`: the log-probs of given tokens."""
    scores_sampling: bool = False
    """True if `score` applies the options of `sampling` except penalties. Otherwise, it supports only temperature 1."""
    scores_candidates: bool = False
    """True if `score` supports the argument `candidates`."""
    generates_packed: bool = False
    """True if the rollout computes prompts as packed rows, with models of transformers that support this."""
    supports_adapter: bool = False
    """True if the rollout supports `RolloutEngineConfig.lora`: the base weights are synced once, and the adapter at
    every weight sync."""
    supports_routed_experts: bool = False
    """True if the rollout supports `RolloutEngineConfig.enable_return_routed_experts`."""

    def inner_rollout(self, engine_kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return the name and the options of the rollout to which this one passes its config, if there is one."""
        if self.wraps is None:
            return None
        # Options of `process` itself are not passed on.
        options = {name: value for name, value in engine_kwargs.items() if name not in ("rollout", "timeout")}
        return str(engine_kwargs.get("rollout", self.wraps)), options

    def with_options(self, engine_kwargs: Mapping[str, Any]) -> "RolloutCapabilities":
        """Return the capabilities of the rollout with these options."""
        library = self.library if self.options.uses_library(engine_kwargs) else None
        return replace(self, reads=self.reads - self.options.ignored_keys(engine_kwargs), library=library)

    def around(self, inner: "RolloutCapabilities") -> "RolloutCapabilities":
        """Return the capabilities of this rollout with the one to which it passes its config."""
        both = {name: getattr(self, name) and getattr(inner, name) for name in _FEATURES_OF_BOTH}
        return replace(inner, wraps=self.wraps, reads=self.reads | inner.reads, **both)


_FEATURES_OF_BOTH = (
    *("continues_rows", "keeps_rows", "scores_prompts", "scores_sampling", "scores_candidates"),
    *("supports_adapter", "supports_routed_experts"),
)
"""Features that a rollout which wraps another has if both declare them. The others are those of the inner one."""
