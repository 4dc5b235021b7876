"""Keys that sections with a training engine share."""

from abc import abstractmethod
from typing import Annotated, Any

from pydantic import PositiveFloat

from camshaft.config.backends import ranks_per_row
from camshaft.config.schema.fields import Auto, Count, LossAggMode, Section, Text, key, section
from camshaft.config.schema.fsdp import ForwardFSDPConfig, FSDPConfig
from camshaft.config.schema.model import CheckpointConfig


def global_size_field(default: int | str | None, passes: str) -> Any:
    """Declare a deprecated micro-batch size, which counts the sequences of all ranks."""
    replacement = "Deprecated, removed in camshaft 1.0. Use the key with the suffix _per_gpu."
    return key(default, f"{replacement} Number of sequences per {passes}, summed over all ranks.", ge=1)


def size_field(default: int | str, passes: str, global_key: str) -> Any:
    """Declare a micro-batch size in sequences."""
    ranks = _on_each_rank(passes).removesuffix(",")
    return key(default, f"Number of sequences per {ranks}. Takes precedence over {global_key}.", ge=1)


def tokens_field(default: int | str, passes: str, dynamic_key: str = "use_dynamic_bsz") -> Any:
    """Declare a micro-batch size in tokens."""
    ranks = _on_each_rank(passes)
    return key(default, f"Maximum number of tokens per {ranks} with {dynamic_key}=true.", ge=1)


def _on_each_rank(passes: str) -> str:
    """Describe passes on each rank, with commas around a relative clause."""
    return f"{passes}, on each rank," if " that " in passes else f"{passes} on each rank"


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

    ppo_micro_batch_size: int | None = global_size_field(None, "forward and backward pass")
    ppo_micro_batch_size_per_gpu: int | None = size_field(8, "forward and backward pass", "ppo_micro_batch_size")
    ppo_max_token_len_per_gpu: Count = key(
        16384,
        "Maximum number of tokens per forward and backward pass on each rank with use_dynamic_bsz=true. "
        "Sequence-parallel ranks share these tokens.",
    )
    loss_agg_mode: LossAggMode = key(
        "token-mean",
        "Aggregation of the token losses. token-mean averages over all tokens of a mini-batch. The seq-mean modes "
        "average over responses: seq-mean-token-sum after summing the tokens of each response, seq-mean-token-mean "
        "after averaging them, and seq-mean-token-sum-norm after summing them and dividing by "
        "data.max_response_length.",
    )
    ppo_epochs: Count = key(1, "Number of optimization epochs over the responses of one iteration.")
    shuffle: bool = key(True, "Shuffle the sequences in every epoch before they are split into mini-batches.")
