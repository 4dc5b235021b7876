"""Sections of the roles that run a model: actor, reference and rollout (in `actor_rollout_ref`), and critic.

Batch sizes: `ppo_mini_batch_size` counts prompts over all ranks; `..._per_gpu` counts sequences on one
rank; the deprecated `ppo_micro_batch_size` and similar keys count sequences over all ranks. `render.py`
prints the resulting batch sizes.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from camshaft.config.backends import ranks_per_row
from camshaft.config.schema.algorithm import POLICY_LOSSES
from camshaft.config.schema.fields import Described, DType, KLPenalty, LossAggMode, Path, Section, Text
from camshaft.config.schema.fsdp import ForwardFSDPConfig, FSDPConfig
from camshaft.config.schema.model import (
    CheckpointConfig,
    OptimSection,
    PolicyModelConfig,
    ResponsesModelConfig,
)

LoadFormat = Literal["auto", "hf", "dtensor", "megatron", "dummy_hf", "dummy_dtensor", "dummy_megatron"]


PolicyLossName = Annotated[Text, Described(f"one of {', '.join(POLICY_LOSSES)}, or package.module:function")]


class PolicyLossConfig(Section):
    """Selection of the policy loss."""

    loss_mode: PolicyLossName = Field(description="Policy loss; vanilla is clipped PPO. See algorithms.md.")


class ActorConfig(Section):
    """Training of the policy."""

    strategy: Text = Field(description="Training engine: a registered name, or package.module:Class.")
    ppo_mini_batch_size: int = Field(ge=1, description="Prompts per optimizer step, over all ranks.")
    ppo_micro_batch_size: int = Field(
        ge=1, description="Deprecated: sequences per forward pass over all ranks; use ppo_micro_batch_size_per_gpu."
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward and backward pass on one rank; overrides ppo_micro_batch_size."
    )
    use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens instead of sequences.")
    ppo_max_token_len_per_gpu: int = Field(
        ge=1, description="Maximum tokens per forward and backward pass on one rank."
    )
    grad_clip: float = Field(gt=0, description="Maximum gradient norm; larger gradients are clipped.")
    clip_ratio: float = Field(
        ge=0, description="PPO clip range: the ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]."
    )
    clip_ratio_low: float | None = Field(
        ge=0, description="Lower clip range; 1 or more disables the lower clip. null uses clip_ratio."
    )
    clip_ratio_high: float | None = Field(ge=0, description="Upper clip range; null uses clip_ratio.")
    clip_ratio_c: float = Field(gt=1, description="Dual-clip bound of the ratio for negative advantages.")
    entropy_coeff: float = Field(description="Coefficient of the entropy bonus in the loss.")
    loss_agg_mode: LossAggMode = Field(description="Aggregation of token losses.")
    use_kl_loss: bool = Field(description="Add a KL loss with respect to the reference policy.")
    kl_loss_coef: float = Field(ge=0, description="Coefficient of the KL loss.")
    kl_loss_type: KLPenalty = Field(description="Estimator of the KL loss; full computes it over the vocabulary.")
    policy_loss: PolicyLossConfig = Field(description="Selection of the policy loss.")
    ppo_epochs: int = Field(ge=1, description="Epochs over the data of one iteration.")
    shuffle: bool = Field(description="Shuffle mini-batches every epoch.")
    optim: OptimSection = Field(description="Optimizer and learning-rate schedule of the actor.")
    fsdp_config: FSDPConfig = Field(description="Dtype and sharding of the actor.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ulysses sequence-parallel size in ranks.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    engine_kwargs: dict[str, Any] = Field(
        description="Options of a custom engine, validated by the engine's schema; the FSDP engines read fsdp_config."
    )
    checkpoint: CheckpointConfig = Field(description="Checkpoint contents and writing mode.")

    def engine_keys(self) -> dict[str, Any]:
        """Return the settings that an engine may have an option for, by the name of the option."""
        return self.fsdp_config.model_dump() | {
            "ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size,
            "use_torch_compile": self.use_torch_compile,
            "async_save": self.checkpoint.async_save,
        }

    def ranks_per_row(self) -> int:
        """Return the number of ranks that share one row."""
        return ranks_per_row(self.strategy, self.engine_keys(), self.engine_kwargs)

    def clip_range(self) -> tuple[float, float]:
        """Return (low, high); the probability ratio is clipped to [1 - low, 1 + high]."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


class RefConfig(Section):
    """The frozen reference policy of the KL divergence; it has the actor's model and strategy.

    With model.lora_rank > 0 the reference is the actor's engine without its adapter, and this section is not read.
    """

    fsdp_config: ForwardFSDPConfig = Field(description="Dtype and sharding of the reference.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ulysses sequence-parallel size in ranks.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    engine_kwargs: dict[str, Any] = Field(
        description="Options of a custom engine, validated by the engine's schema; the FSDP engines read fsdp_config."
    )
    log_prob_micro_batch_size: int = Field(
        ge=1,
        description="Deprecated: sequences per forward pass over all ranks; use log_prob_micro_batch_size_per_gpu.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward pass on one rank; overrides log_prob_micro_batch_size."
    )
    log_prob_use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens instead of sequences.")
    log_prob_max_token_len_per_gpu: int = Field(ge=1, description="Maximum tokens per forward pass on one rank.")

    def engine_keys(self) -> dict[str, Any]:
        """Return the settings that an engine may have an option for, by the name of the option."""
        return self.fsdp_config.model_dump() | {
            "ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size,
            "use_torch_compile": self.use_torch_compile,
        }

    def ranks_per_row(self, strategy: str) -> int:
        """Return the number of ranks that share one row."""
        return ranks_per_row(strategy, self.engine_keys(), self.engine_kwargs)


class ValKwargs(Section):
    """Sampling in validation."""

    do_sample: bool = Field(description="Sample in validation; false decodes greedily.")
    temperature: float = Field(ge=0, description="Sampling temperature in validation; 0 decodes greedily.")
    top_k: int = Field(ge=-1, description="Top-k in validation; 0 or -1 disables it.")
    top_p: float = Field(gt=0, le=1, description="Top-p (nucleus) probability in validation; 1 disables it.")
    n: int = Field(ge=1, description="Responses per validation prompt.")


class GeneratorConfig(Section):
    """Settings of a generator, in training and in `camshaft generate`."""

    name: Text = Field(description="Generator: a registered name, or package.module:Class.")
    n: int = Field(ge=1, description="Responses per prompt.")
    temperature: float = Field(
        gt=0, description="Sampling temperature; also applied to the logits in training log-probs."
    )
    top_k: int = Field(ge=-1, description="Top-k; 0 or -1 disables it.")
    top_p: float = Field(gt=0, le=1, description="Top-p (nucleus) probability; 1 disables it.")
    prompt_length: int = Field(ge=1, description="Maximum prompt length in tokens.")
    response_length: int = Field(ge=1, description="Maximum response length in tokens.")
    dtype: DType = Field(description="Dtype of the generator's weights; should equal the actor's compute dtype.")
    gpu_memory_utilization: float = Field(
        gt=0, le=1, description="Fraction of device memory for the generator; vllm and sglang only."
    )
    ignore_eos: bool = Field(description="Continue generation after the end-of-sequence token.")
    enforce_eager: bool = Field(description="Disable CUDA graphs and compilation; vllm, sglang, and torch on a GPU.")
    free_cache_engine: bool = Field(description="Free the KV cache after generation.")
    load_format: LoadFormat = Field(
        description="Start with uninitialized weights (dummy_*), or load them from the model folder; vllm and sglang "
        "only."
    )
    tensor_model_parallel_size: int = Field(
        ge=1,
        description="Tensor-parallel size of the generator: consecutive ranks (vllm), or processes (sglang).",
    )
    enable_prefix_caching: bool = Field(
        description="Reuse the KV cache of shared prompt prefixes; vllm and sglang only."
    )
    update_weights_bucket_megabytes: int = Field(
        ge=1, description="Bucket size of the weight sync to a generator in another process, in megabytes."
    )
    max_num_batched_tokens: int = Field(ge=1, description="Maximum prompt tokens per prefill step on one rank.")
    max_num_seqs: int = Field(ge=1, description="Maximum sequences decoded concurrently on one rank.")
    do_sample: bool = Field(description="Sample responses; false decodes greedily.")
    engine_kwargs: dict[str, Any] = Field(
        description="Options passed to vllm, sglang, server, or a custom generator; torch and hf accept none."
    )


class RolloutConfig(GeneratorConfig):
    """Generation of responses in training."""

    lora_weights: Literal["merged", "adapter"] = Field(
        description="Weight sync with model.lora_rank > 0: merged sends all weights with the adapter merged; adapter "
        "(vllm) sends the base model once, then only the adapter."
    )
    log_prob_micro_batch_size: int = Field(
        ge=1,
        description="Deprecated: sequences per old log-prob forward pass over all ranks; use "
        "log_prob_micro_batch_size_per_gpu.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per old log-prob forward pass on one rank; overrides log_prob_micro_batch_size."
    )
    log_prob_use_dynamic_bsz: bool = Field(
        description="Size old log-prob micro-batches by tokens instead of sequences."
    )
    log_prob_max_token_len_per_gpu: int = Field(
        ge=1, description="Maximum tokens per old log-prob forward pass on one rank."
    )
    val_kwargs: ValKwargs = Field(description="Sampling in validation.")


class ActorRolloutRefConfig(Section):
    """Actor, rollout and reference, which share one model."""

    resource_pool: Text = Field(description="Resource pool: global_pool, or a name in trainer.resource_pools.")
    worker_cls: Text | None = Field(
        description="Class for actor, rollout and reference, package.module:Class; null: ActorRolloutRefWorker."
    )
    hybrid_engine: bool = Field(description="Place actor and rollout on the same devices; must be true.")
    model: PolicyModelConfig = Field(description="Model of actor, rollout and reference.")
    actor: ActorConfig = Field(description="Training of the policy.")
    ref: RefConfig = Field(description="Frozen reference policy of the KL divergence.")
    rollout: RolloutConfig = Field(description="Generation of responses.")


class CriticModelConfig(ResponsesModelConfig):
    """The critic's model: a language model with a value head, one value per token."""

    tokenizer_path: Path = Field(description="Tokenizer of the critic; must have the same token ids as the actor's.")
    fsdp_config: FSDPConfig = Field(description="Dtype and sharding of the critic.")


class CriticConfig(Section):
    """The value function, used if the advantage estimator needs it (gae or a custom one)."""

    enable: bool | None = Field(
        description="Use a critic; null enables it for gae only. Set true for a custom estimator."
    )
    resource_pool: Text = Field(description="Resource pool: global_pool, or a name in trainer.resource_pools.")
    worker_cls: Text | None = Field(description="Class for the critic, package.module:Class; null: CriticWorker.")
    strategy: Text = Field(description="Training engine: a registered name, or package.module:Class.")
    optim: OptimSection = Field(description="Optimizer and learning-rate schedule of the critic.")
    model: CriticModelConfig = Field(description="Model of the critic.")
    ppo_mini_batch_size: int = Field(ge=1, description="Prompts per optimizer step, over all ranks.")
    ppo_micro_batch_size: int = Field(
        ge=1, description="Deprecated: sequences per forward pass over all ranks; use ppo_micro_batch_size_per_gpu."
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward and backward pass on one rank; overrides ppo_micro_batch_size."
    )
    forward_micro_batch_size: int = Field(
        ge=1,
        description="Deprecated: sequences per value forward pass over all ranks; use "
        "forward_micro_batch_size_per_gpu.",
    )
    forward_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward pass on one rank; overrides forward_micro_batch_size."
    )
    use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens instead of sequences.")
    ppo_max_token_len_per_gpu: int = Field(
        ge=1, description="Maximum tokens per forward and backward pass on one rank."
    )
    forward_max_token_len_per_gpu: int = Field(ge=1, description="Maximum tokens per forward pass on one rank.")
    ppo_epochs: int = Field(ge=1, description="Epochs over the data of one iteration.")
    shuffle: bool = Field(description="Shuffle mini-batches every epoch.")
    grad_clip: float = Field(gt=0, description="Maximum gradient norm; larger gradients are clipped.")
    cliprange_value: float = Field(
        gt=0, description="Value clip range: new values are clipped to old values +- cliprange_value."
    )
    loss_agg_mode: LossAggMode = Field(description="Aggregation of token losses.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ulysses sequence-parallel size in ranks.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    engine_kwargs: dict[str, Any] = Field(
        description="Options of a custom engine, validated by the engine's schema; the FSDP engines read fsdp_config."
    )
    checkpoint: CheckpointConfig = Field(description="Checkpoint contents and writing mode.")

    def engine_keys(self) -> dict[str, Any]:
        """Return the settings that an engine may have an option for, by the name of the option."""
        return self.model.fsdp_config.model_dump() | {
            "ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size,
            "use_torch_compile": self.use_torch_compile,
            "async_save": self.checkpoint.async_save,
            "activation_offload": self.model.enable_activation_offload,
        }

    def ranks_per_row(self) -> int:
        """Return the number of ranks that share one row."""
        return ranks_per_row(self.strategy, self.engine_keys(), self.engine_kwargs)
