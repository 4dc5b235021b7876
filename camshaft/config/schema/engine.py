"""Keys that sections with a training engine share."""

from abc import abstractmethod
from typing import Annotated, Any

from pydantic import Field

from camshaft.config.backends import ranks_per_row
from camshaft.config.schema.fields import Auto, LossAggMode, Section, Text
from camshaft.config.schema.fsdp import ForwardFSDPConfig, FSDPConfig
from camshaft.config.schema.model import CheckpointConfig


class PooledSection(Section):
    """Keys of a role that runs in a resource pool."""

    resource_pool: Text = Field(
        description="Resource pool whose devices are used: global_pool, or a name defined in trainer.resource_pools."
    )


class EngineSection(Section):
    """Keys of a section that runs a model with a training engine."""

    ulysses_sequence_parallel_size: int = Field(
        ge=1,
        description="Ulysses sequence-parallel size: number of ranks over which the tokens of a micro-batch are split.",
    )
    use_torch_compile: Annotated[bool, Auto()] = Field(
        description="Compile the transformer layers with torch.compile. auto compiles on an accelerator with Triton "
        "if the engine can."
    )
    engine_kwargs: dict[str, Any] = Field(
        description="Options of a custom engine, validated by the engine's schema. The FSDP engines read fsdp_config "
        "instead."
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

    strategy: Annotated[Text, Auto()] = Field(
        description="Training engine: a registered name, or an import path package.module:Class. auto uses the engine "
        "of the actor."
    )

    def ranks_per_row(self) -> int:
        """Return the number of ranks that process the same rows: the model-parallel size."""
        return ranks_per_row(self.strategy, self.engine_keys(), self.engine_kwargs)


class TrainedSection(SelectedEngineSection):
    """Keys of a section that trains a model."""

    grad_clip: float = Field(
        gt=0, description="Maximum gradient norm. Gradients with a larger norm are scaled down to it."
    )
    checkpoint: CheckpointConfig = Field(description="Checkpoint contents, and synchronous or asynchronous writing.")

    def engine_keys(self) -> dict[str, Any]:
        return super().engine_keys() | {"async_save": self.checkpoint.async_save}


class PPOUpdateSection(TrainedSection):
    """Keys of the updates of actor and critic."""

    ppo_micro_batch_size: int | None = Field(
        ge=1,
        description="Deprecated, removed in camshaft 1.0. Use the key with the suffix _per_gpu. Number of "
        "sequences per forward and backward pass, summed over all ranks.",
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        ge=1,
        description="Number of sequences per forward and backward pass on each rank. Takes precedence over "
        "ppo_micro_batch_size.",
    )
    ppo_max_token_len_per_gpu: int = Field(
        ge=1,
        description="Maximum number of tokens per forward and backward pass on each rank with use_dynamic_bsz=true. "
        "Sequence-parallel ranks share these tokens.",
    )
    loss_agg_mode: LossAggMode = Field(
        description="Aggregation of the token losses. token-mean averages over all tokens of a mini-batch. The "
        "seq-mean modes average over responses: seq-mean-token-sum after summing the tokens of each response, "
        "seq-mean-token-mean after averaging them, and seq-mean-token-sum-norm after summing them and dividing by "
        "data.max_response_length."
    )
    ppo_epochs: int = Field(ge=1, description="Number of optimization epochs over the responses of one iteration.")
    shuffle: bool = Field(description="Shuffle the sequences in every epoch before they are split into mini-batches.")
