"""Sections of the roles that run a model: actor, reference, rollout (in `actor_rollout_ref`) and critic.

Batch sizes: `ppo_mini_batch_size` counts prompts over all ranks; `..._per_gpu` counts sequences on one
rank; the older `ppo_micro_batch_size` and the like count sequences over all ranks. `table.py` prints what
follows from them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from camshaft.config.part_names import POLICY_LOSSES
from camshaft.config.schema.fields import DType, KLPenalty, LossAggMode, Path, Says, Section, Text
from camshaft.config.schema.model import (
    CheckpointConfig,
    ForwardFSDPConfig,
    FSDPConfig,
    OptimSection,
    PolicyModelConfig,
    ResponsesModelConfig,
)

LoadFormat = Literal["auto", "hf", "dtensor", "megatron", "dummy_hf", "dummy_dtensor", "dummy_megatron"]


PolicyLossName = Annotated[Text, Says(f"one of {', '.join(POLICY_LOSSES)}, or package.module:function")]


class PolicyLossConfig(Section):
    """Which form of the policy loss."""

    loss_mode: PolicyLossName = Field(description="Form of the policy loss; vanilla is clipped PPO. See algorithms.md.")


class ActorConfig(Section):
    """The policy that is trained."""

    strategy: Text = Field(description="Training engine: a name, or package.module:Class for one of your own.")
    ppo_mini_batch_size: int = Field(ge=1, description="Prompts per optimizer step, over all ranks.")
    ppo_micro_batch_size: int = Field(ge=1, description="Older: sequences per forward pass, over all ranks.")
    ppo_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward and backward pass on one rank; wins over ppo_micro_batch_size."
    )
    use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens, not sequences.")
    ppo_max_token_len_per_gpu: int = Field(ge=1, description="Most tokens per forward and backward pass on one rank.")
    grad_clip: float = Field(gt=0, description="Longest gradient; a longer one is scaled down to it.")
    clip_ratio: float = Field(ge=0, description="PPO clips the ratio of probabilities to 1 - this .. 1 + this.")
    clip_ratio_low: float | None = Field(
        ge=0, description="Lower side of the clip, 1 or more for none; null takes clip_ratio."
    )
    clip_ratio_high: float | None = Field(ge=0, description="Upper side of the clip; null takes clip_ratio.")
    clip_ratio_c: float = Field(gt=1, description="Dual clip: bound of the ratio where the advantage is negative.")
    entropy_coeff: float = Field(description="Weight of the entropy bonus in the loss.")
    loss_agg_mode: LossAggMode = Field(description="How the losses of tokens become one number.")
    use_kl_loss: bool = Field(description="Add the KL divergence from the reference policy to the loss.")
    kl_loss_coef: float = Field(ge=0, description="Weight of that divergence.")
    kl_loss_type: KLPenalty = Field(description="Estimator of that divergence; full is exact, over the vocabulary.")
    policy_loss: PolicyLossConfig = Field(description="Form of the policy loss.")
    ppo_epochs: int = Field(ge=1, description="Passes over one iteration's data.")
    shuffle: bool = Field(description="Draw mini-batches in a new order every epoch.")
    optim: OptimSection = Field(description="Optimizer and schedule of the actor.")
    fsdp_config: FSDPConfig = Field(description="Number format and sharding of the actor.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ranks that share the tokens of one micro-batch.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    checkpoint: CheckpointConfig = Field(description="How checkpoints are written.")

    def ranks_per_row(self) -> int:
        """Ranks that compute one row together."""
        return self.ulysses_sequence_parallel_size * self.fsdp_config.tensor_parallel_size

    def clip_range(self) -> tuple[float, float]:
        """(low, high): the ratio of probabilities is clipped to 1 - low .. 1 + high."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


class RefConfig(Section):
    """The frozen policy that the KL divergence is measured from; the actor's model and strategy.

    With model.lora_rank above 0 it is the actor's own engine without its adapter, and nothing here is read.
    """

    fsdp_config: ForwardFSDPConfig = Field(description="Number format and sharding of the reference.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ranks that share the tokens of one micro-batch.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    log_prob_micro_batch_size: int = Field(ge=1, description="Older: sequences per forward pass, over all ranks.")
    log_prob_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward pass on one rank; wins over log_prob_micro_batch_size."
    )
    log_prob_use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens, not sequences.")
    log_prob_max_token_len_per_gpu: int = Field(ge=1, description="Most tokens per forward pass on one rank.")

    def ranks_per_row(self) -> int:
        """Ranks that compute one row together."""
        return self.ulysses_sequence_parallel_size * self.fsdp_config.tensor_parallel_size


class ValKwargs(Section):
    """Sampling in validation."""

    do_sample: bool = Field(description="Sample in validation; false takes the likeliest token.")
    temperature: float = Field(ge=0, description="Temperature in validation; 0 takes the likeliest token.")
    top_k: int = Field(ge=-1, description="Keep the k likeliest tokens in validation; 0 or -1 keeps all.")
    top_p: float = Field(gt=0, le=1, description="Keep the likeliest tokens of so much probability in validation.")
    n: int = Field(ge=1, description="Responses per validation prompt.")


class GeneratorConfig(Section):
    """What a generator is told, in a training run and by `camshaft generate`."""

    name: Text = Field(description="Generator: a name, or package.module:Class for one of your own.")
    n: int = Field(ge=1, description="Responses per prompt.")
    temperature: float = Field(gt=0, description="Divides the logits before sampling, and in log-probs of training.")
    top_k: int = Field(ge=-1, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    top_p: float = Field(gt=0, le=1, description="Keep the likeliest tokens of so much probability; 1 keeps all.")
    prompt_length: int = Field(ge=1, description="Longest prompt that the generator is set up for.")
    response_length: int = Field(ge=1, description="Longest response that is generated.")
    dtype: DType = Field(description="Number format of the generator's weights; should be the actor's.")
    gpu_memory_utilization: float = Field(
        gt=0, le=1, description="Share of the device's memory for the generator; vllm and sglang only."
    )
    ignore_eos: bool = Field(description="Generate on after the end-of-sequence token.")
    enforce_eager: bool = Field(
        description="Generate without CUDA graphs and compilation; vllm, sglang, and torch on a GPU."
    )
    free_cache_engine: bool = Field(description="Free the key-value cache after generation.")
    load_format: LoadFormat = Field(
        description="Start without weights (dummy_...), or with those of the folder; vllm and sglang only."
    )
    tensor_model_parallel_size: int = Field(
        ge=1,
        description="Ranks, one after the other, that are one generator (vllm); processes of one generator (sglang).",
    )
    enable_prefix_caching: bool = Field(description="Compute equal beginnings of prompts once; vllm and sglang only.")
    update_weights_bucket_megabytes: int = Field(
        ge=1, description="Size of the buckets in which weights go to a generator in another process."
    )
    max_num_batched_tokens: int = Field(ge=1, description="Most prompt tokens computed together on one rank.")
    max_num_seqs: int = Field(ge=1, description="Most sequences decoded together on one rank.")
    do_sample: bool = Field(description="Sample; false takes the likeliest token.")
    engine_kwargs: dict[str, Any] = Field(
        description="Options for vllm, sglang, server, or a generator of your own, as they are; torch and hf take none."
    )


class RolloutConfig(GeneratorConfig):
    """Generation of responses in training."""

    lora_weights: Literal["merged", "adapter"] = Field(
        description="With model.lora_rank: hand over all weights with the adapter merged in, or (vllm) the base model"
        " once and then the adapter alone."
    )
    log_prob_micro_batch_size: int = Field(
        ge=1, description="Older: sequences per forward pass of the actor's old log-probs, over all ranks."
    )
    log_prob_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="The same on one rank; wins over log_prob_micro_batch_size."
    )
    log_prob_use_dynamic_bsz: bool = Field(description="Size these micro-batches by tokens, not sequences.")
    log_prob_max_token_len_per_gpu: int = Field(ge=1, description="Most tokens per such forward pass on one rank.")
    val_kwargs: ValKwargs = Field(description="Sampling in validation.")


class ActorRolloutRefConfig(Section):
    """Actor, rollout and reference: one model, three uses."""

    resource_pool: Text = Field(description="Which devices it lives on: global_pool, or one of trainer.resource_pools.")
    hybrid_engine: bool = Field(description="Actor and rollout share devices and hand weights over; the only layout.")
    model: PolicyModelConfig = Field(description="The model of actor, rollout and reference.")
    actor: ActorConfig = Field(description="Training of the policy.")
    ref: RefConfig = Field(description="The frozen policy that the KL divergence is measured from.")
    rollout: RolloutConfig = Field(description="Generation of responses.")


class CriticModelConfig(ResponsesModelConfig):
    """The critic's model: a language model whose head gives one value per token."""

    tokenizer_path: Path = Field(description="Tokenizer that this model was made for; must be the actor's.")
    fsdp_config: FSDPConfig = Field(description="Number format and sharding of the critic.")


class CriticConfig(Section):
    """The value function; built only when the advantage estimator needs it (gae, or one of your own)."""

    enable: bool | None = Field(
        description="Whether there is a critic; null: for gae alone. true is for an estimator of your own."
    )
    resource_pool: Text = Field(description="Which devices it lives on: global_pool, or one of trainer.resource_pools.")
    strategy: Text = Field(description="Training engine: a name, or package.module:Class for one of your own.")
    optim: OptimSection = Field(description="Optimizer and schedule of the critic.")
    model: CriticModelConfig = Field(description="The critic's model.")
    ppo_mini_batch_size: int = Field(ge=1, description="Prompts per optimizer step, over all ranks.")
    ppo_micro_batch_size: int = Field(ge=1, description="Older: sequences per forward pass, over all ranks.")
    ppo_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward and backward pass on one rank; wins over ppo_micro_batch_size."
    )
    forward_micro_batch_size: int = Field(ge=1, description="Older: ppo_micro_batch_size when values are computed.")
    forward_micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward pass on one rank; wins over forward_micro_batch_size."
    )
    use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens, not sequences.")
    ppo_max_token_len_per_gpu: int = Field(ge=1, description="Most tokens per forward and backward pass on one rank.")
    forward_max_token_len_per_gpu: int = Field(ge=1, description="Most tokens per forward pass on one rank.")
    ppo_epochs: int = Field(ge=1, description="Passes over one iteration's data.")
    shuffle: bool = Field(description="Draw mini-batches in a new order every epoch.")
    grad_clip: float = Field(gt=0, description="Longest gradient; a longer one is scaled down to it.")
    cliprange_value: float = Field(gt=0, description="The new value is clipped to the old one +- this.")
    loss_agg_mode: LossAggMode = Field(description="How the losses of tokens become one number.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ranks that share the tokens of one micro-batch.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    checkpoint: CheckpointConfig = Field(description="How checkpoints are written.")

    def ranks_per_row(self) -> int:
        """Ranks that compute one row together."""
        return self.ulysses_sequence_parallel_size * self.model.fsdp_config.tensor_parallel_size
