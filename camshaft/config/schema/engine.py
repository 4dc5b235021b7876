"""Keys that sections with a training engine share."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any

from pydantic import PositiveFloat

from camshaft.config.backends import ranks_per_row
from camshaft.config.schema.fields import Auto, Count, LossAggMode, Section, Text, Unread, key, section, unless
from camshaft.config.schema.fsdp import ForwardFSDPConfig, FSDPConfig
from camshaft.config.schema.model import CheckpointConfig


@dataclass(frozen=True)
class MicroBatchKeys:
    """Keys of a section that limit micro-batches by sequences or by tokens."""

    passes: str
    """The passes of a micro-batch, for the descriptions."""
    size: str
    """Key of the number of sequences on each rank. Without the suffix `_per_gpu`, the sequences of all ranks count."""
    tokens: str
    dynamic: str = "use_dynamic_bsz"
    """Key that selects the limit by tokens."""
    sequences: int = 8
    """Limit by sequences that `auto` selects if there is none by tokens."""
    has_global_size: bool = True
    """True if a deprecated key without the suffix `_per_gpu` counts the sequences of all ranks."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The keys of the limits by sequences."""
        return (self.size, self.size.removesuffix("_per_gpu")) if self.has_global_size else (self.size,)

    def dynamic_key(self, default: str = "auto", note: str = "") -> Any:
        """Declare the choice between the limits."""
        description = f"Limit micro-batches by tokens ({self.tokens}) instead of by sequences. {note}"
        return key(default, f"{description}auto does so unless {self.size} is set.")

    def global_size_key(self, default: int | str | None) -> Any:
        """Declare the deprecated number of sequences of all ranks."""
        replacement = "Deprecated, removed in camshaft 1.0. Use the key with the suffix _per_gpu."
        description = f"{replacement} Number of sequences per {self.passes}, summed over all ranks."
        return key(default, description, unread=(self.by_tokens, _limited_per_rank(self.size)), ge=1)

    def size_key(self, default: str = "auto") -> Any:
        """Declare the number of sequences on each rank."""
        description = f"Number of sequences per {self._on_each_rank().removesuffix(',')}. Takes precedence over "
        description += f"{self.size.removesuffix('_per_gpu')}. auto is {self.sequences} with {self.dynamic}=false."
        return key(default, description, unread=self.by_tokens, ge=1)

    def tokens_key(self, default: str = "auto", note: str = "") -> Any:
        """Declare the number of tokens on each rank."""
        description = f"Maximum number of tokens per {self._on_each_rank()} with {self.dynamic}=true.{note}"
        return key(default, description, unread=unless(self.dynamic), ge=1)

    @cached_property
    def by_tokens(self) -> Unread:
        """Condition under which nothing reads a limit by sequences."""
        fix = f"set [{self.tokens}], or omit the key"
        return Unread(lambda section: getattr(section, self.dynamic), f"{{{self.dynamic}}}", fix)

    def _on_each_rank(self) -> str:
        """Describe the passes on each rank, with commas around a relative clause."""
        return f"{self.passes}, on each rank," if " that " in self.passes else f"{self.passes} on each rank"


@cache
def _limited_per_rank(size: str) -> Unread:
    """Return the condition under which nothing reads a limit over all ranks."""
    return Unread(lambda section: getattr(section, size) is not None, f"{{{size}}}")


UPDATES = MicroBatchKeys("forward and backward pass", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")


class PooledSection(Section):
    """Keys of a role that runs in a resource pool."""

    resource_pool: Text = key(
        "global_pool", "Resource pool whose devices are used: global_pool, or a name defined in trainer.resource_pools."
    )


class EngineSection(Section):
    """Keys of a section that runs a model with a training engine."""

    ulysses_sequence_parallel_size: Count = key(
        1, "Ulysses sequence-parallel size: number of ranks over which the tokens of a micro-batch are split."
    )
    use_torch_compile: Annotated[bool, Auto()] = key(
        "auto",
        "Compile the transformer layers with torch.compile. auto compiles on an accelerator with Triton if the "
        "engine can.",
    )
    engine_kwargs: dict[str, Any] = key(
        {}, "Options of a custom engine, validated by the engine's schema. The FSDP engines read fsdp_config instead."
    )

    @abstractmethod
    def sharding(self) -> ForwardFSDPConfig | FSDPConfig:
        """Return the section `fsdp_config`, which can be a part of another section."""

    def engine_keys(self) -> dict[str, Any]:
        """Map names of engine options to the values of this section."""
        return self.sharding().model_dump() | {
            "ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size,
            "use_torch_compile": self.use_torch_compile,
        }


class SelectedEngineSection(EngineSection):
    """Keys of a section that also selects the engine."""

    strategy: Annotated[Text, Auto()] = key(
        "${actor_rollout_ref.actor.strategy}",
        "Training engine: a registered name, or an import path package.module:Class. auto uses the engine of the "
        "actor.",
    )

    def ranks_per_row(self) -> int:
        """Return the number of ranks that process the same rows: the model-parallel size."""
        return ranks_per_row(self.strategy, self.engine_keys(), self.engine_kwargs)


class TrainedSection(SelectedEngineSection):
    """Keys of a section that trains a model."""

    grad_clip: PositiveFloat = key(1.0, "Maximum gradient norm. Gradients with a larger norm are scaled down to it.")
    checkpoint: CheckpointConfig = section("Checkpoint contents, and synchronous or asynchronous writing.")

    def engine_keys(self) -> dict[str, Any]:
        return super().engine_keys() | {"async_save": self.checkpoint.async_save}


class PPOUpdateSection(TrainedSection):
    """Keys of the updates of actor and critic."""

    ppo_micro_batch_size: int | None = UPDATES.global_size_key(None)
    ppo_micro_batch_size_per_gpu: Annotated[int | None, Auto()] = UPDATES.size_key()
    ppo_max_token_len_per_gpu: Annotated[Count, Auto()] = UPDATES.tokens_key(
        note=" Sequence-parallel ranks share these tokens. auto is 4096 on a CPU and 16384 on an accelerator (32768 "
        "for the critic), less on a GPU in which this does not fit, and at least the length of the longest sequence."
    )
    loss_agg_mode: LossAggMode | None = key(
        None,
        "Aggregation of the token losses. token-mean averages over all tokens of a mini-batch, token-sum adds them. "
        "The seq-mean modes average over responses: seq-mean-token-sum after summing the tokens of each response, "
        "seq-mean-token-mean after averaging them, and seq-mean-token-sum-norm after summing them and dividing by "
        "data.max_response_length. null is token-mean, except for policy losses that are defined with another one: "
        "seq-mean-token-mean for gspo, geo_mean and sapo.",
    )
    ppo_epochs: Count = key(1, "Number of optimization epochs over the responses of one iteration.")
    shuffle: bool = key(True, "Shuffle the sequences in every epoch before they are split into mini-batches.")

    def aggregation(self) -> LossAggMode:
        """Return the aggregation of the token losses."""
        return self.loss_agg_mode or "token-mean"
