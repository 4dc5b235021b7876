"""Sections `actor_rollout_ref` (actor, reference and rollout) and `critic`.

Batch sizes have different units. `ppo_mini_batch_size` counts prompts, summed over all ranks. Keys that end in
`_per_gpu` count sequences (or tokens) on each rank. The deprecated keys such as `ppo_micro_batch_size` count sequences,
summed over all ranks. `camshaft.config.batch_table` computes the resulting batch sizes.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from camshaft.config.errors import Problem
from camshaft.config.layout import ROLLOUT_POOL
from camshaft.config.schema.agents import MultiTurnConfig
from camshaft.config.schema.engine import (
    UPDATES,
    EngineSection,
    MicroBatchKeys,
    PooledSection,
    PPOUpdateSection,
)
from camshaft.config.schema.fields import (
    Auto,
    Count,
    Described,
    DType,
    Fraction,
    KLPenaltyName,
    LossAggMode,
    Names,
    Path,
    Penalty,
    PositiveFraction,
    Section,
    Text,
    TokenIDs,
    Unread,
    key,
    section,
    unless,
)
from camshaft.config.schema.fsdp import ForwardFSDPConfig, FSDPConfig
from camshaft.config.schema.model import OptimSection, PolicyModelConfig, ResponsesModelConfig
from camshaft.config.schema.policy_loss import PolicyLossConfig, PolicyLossInputs, policy_loss_inputs

LoadFormat = Literal["auto", "hf", "dtensor", "megatron", "dummy_hf", "dummy_dtensor", "dummy_megatron"]


_WITHOUT_CLIP = Unread(lambda actor: not actor.loss_inputs().clip, "{policy_loss.loss_mode}, which clips no ratio")
_WITHOUT_DUAL_CLIP = Unread(
    lambda actor: not actor.loss_inputs().dual, "{policy_loss.loss_mode}, which has no dual clip"
)
_WITHOUT_ENTROPY_TARGET = Unread(
    lambda actor: actor.entropy_target is None, "{entropy_target}", "set [entropy_target]=0.3, or omit the key"
)
_SEPARATE_CLIP_RANGES = Unread(
    lambda actor: actor.clip_ratio_low is not None and actor.clip_ratio_high is not None,
    "{clip_ratio_low} {clip_ratio_high}",
)
GREEDY = unless("do_sample", harmless=(0,))
"""Condition of sampling parameters, which greedy decoding does not read."""

_LOG_PROB_KEYS = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")
REF_PASSES = MicroBatchKeys("forward pass", *_LOG_PROB_KEYS, sequences=16)
OLD_LOG_PROBS = MicroBatchKeys("forward pass that recomputes old log-probs", *_LOG_PROB_KEYS, sequences=16)
VALUES = MicroBatchKeys(
    "forward pass that computes values", "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"
)


class RouterReplayConfig(Section):
    """Replay of the expert choices of the rollout in a mixture of experts."""

    mode: Literal["disabled", "R3"] = key(
        "disabled",
        "R3 (rollout routing replay) computes old log-probs and updates with the experts that the rollout chose for "
        "each token. The weights of these experts come from the actor's routers. See moe.md.",
    )


class ActorConfig(PPOUpdateSection):
    key_order = (
        "strategy", "ppo_mini_batch_size", "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu",
        "grad_clip", "clip_ratio", "loss_agg_mode", "use_kl_loss", "ppo_epochs", "optim",
        "ulysses_sequence_parallel_size", "checkpoint",
    )  # fmt: skip

    strategy: Annotated[Text, Auto()] = key(
        "auto",
        "Training engine: fsdp (FSDP2, alias fsdp2), megatron, torchtitan, reference (one process without sharding), "
        "another registered name, or an import path package.module:Class. auto selects reference for one process on "
        "a CPU, and fsdp otherwise.",
        short=("engine", "training engine"),
    )
    ppo_mini_batch_size: Annotated[Count, Auto()] = key(
        "auto",
        "Number of prompts per optimizer step, summed over all ranks. Each prompt contributes rollout.n sequences. "
        "auto is data.train_batch_size: one optimizer step per epoch.",
    )
    use_dynamic_bsz: Annotated[bool, Auto()] = UPDATES.dynamic_key(
        note="Batches are not padded, so memory use depends on tokens. "
    )
    clip_ratio: NonNegativeFloat = key(
        0.2,
        "PPO clip range: the probability ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]. It is the default of "
        "clip_ratio_low and clip_ratio_high. The range of geo_mean bounds the log-ratio, that of dppo_tv and dppo_kl "
        "the divergence of a token.",
        unread=(_WITHOUT_CLIP, _SEPARATE_CLIP_RANGES),
    )
    clip_ratio_low: NonNegativeFloat | None = key(
        None,
        "Lower clip range: the probability ratio is clipped from below at 1 - clip_ratio_low. A value of 1 or more "
        "disables the lower bound. null uses clip_ratio.",
        unread=_WITHOUT_CLIP,
    )
    clip_ratio_high: NonNegativeFloat | None = key(
        None,
        "Upper clip range: the probability ratio is clipped from above at 1 + clip_ratio_high. null uses clip_ratio.",
        unread=_WITHOUT_CLIP,
    )
    clip_ratio_c: float = key(
        3.0,
        "Dual-clip coefficient of the vanilla loss: the loss of a token with a negative advantage is at most "
        "-advantage * clip_ratio_c. The upper bound of the ratio in dppo_tv and dppo_kl.",
        gt=1,
        unread=_WITHOUT_DUAL_CLIP,
    )
    entropy_coeff: float = key(
        0.001, "Coefficient of the entropy bonus, which is subtracted from the loss. 0 disables the bonus."
    )
    entropy_target: NonNegativeFloat | None = key(
        None,
        "Target of the mean entropy of a token, in nats. After each iteration, the coefficient of the entropy bonus, "
        "initially entropy_coeff, rises by entropy_coeff_delta if the entropy is below the target, and falls if it is "
        "above. The bonus is used only while the entropy is not above the target. null keeps entropy_coeff constant.",
    )
    entropy_coeff_delta: PositiveFloat = key(
        0.005, "Change of the entropy coefficient per iteration with entropy_target.", unread=_WITHOUT_ENTROPY_TARGET
    )
    entropy_coeff_min: float = key(
        0.0, "Minimum of the entropy coefficient with entropy_target.", unread=_WITHOUT_ENTROPY_TARGET
    )
    entropy_coeff_max: float = key(
        1.0, "Maximum of the entropy coefficient with entropy_target.", unread=_WITHOUT_ENTROPY_TARGET
    )
    use_kl_loss: bool = key(
        False, "Add the KL divergence from the reference policy to the loss. Usually true with GRPO."
    )
    kl_loss_coef: NonNegativeFloat = key(0.001, "Coefficient of the KL loss.", unread=unless("use_kl_loss"))
    kl_loss_type: KLPenaltyName = key(
        "low_var_kl",
        "Estimator of the KL divergence in the loss. full computes the exact divergence over the vocabulary. A final + "
        "replaces the gradient by that of mse, which is the gradient of the divergence on average.",
        unread=unless("use_kl_loss"),
    )
    policy_loss: PolicyLossConfig = section("Policy loss.")
    router_replay: RouterReplayConfig = section("Replay of expert choices in a mixture of experts.")
    optim: OptimSection = section(
        "Optimizer and learning-rate schedule of the actor.",
        {"lr": 1e-6},
    )
    fsdp_config: FSDPConfig = section("Weight dtype and sharding of the actor.")

    def problems(self) -> Iterator[Problem]:
        inputs = self.loss_inputs()
        if inputs.per_response and self.aggregation() != inputs.aggregation:
            message = (
                f"[policy_loss.loss_mode]={self.policy_loss.loss_mode} weights all responses equally. Set "
                f"[loss_agg_mode]={inputs.aggregation}, or omit the key."
            )
            yield Problem("loss_agg_mode", self.loss_agg_mode, message, ("policy_loss.loss_mode",))
        low, high = self.entropy_coeff_min, self.entropy_coeff_max
        if self.entropy_target is not None and not low <= self.entropy_coeff <= high:
            message = (
                f"must be between [entropy_coeff_min]={low:g} and [entropy_coeff_max]={high:g} with [entropy_target]. "
                f"Set [entropy_coeff]={max(low, 0.0):g}."
            )
            yield Problem("entropy_coeff", self.entropy_coeff, message, ("entropy_target",))

    def loss_inputs(self) -> PolicyLossInputs:
        """Return the settings that the policy loss reads."""
        return policy_loss_inputs(self.policy_loss.loss_mode)

    def aggregation(self) -> LossAggMode:
        return self.loss_agg_mode or self.loss_inputs().aggregation

    def sharding(self) -> FSDPConfig:
        return self.fsdp_config

    def clip_range(self) -> tuple[float, float]:
        """Return the clip range (low, high). The probability ratio is clipped to [1 - low, 1 + high]."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


class RefConfig(EngineSection):
    """Frozen reference policy for the KL divergence. It uses the model and the engine (`strategy`) of the actor.

    With `model.lora_rank > 0` the reference is the actor with its adapter disabled, and this section is not read.
    """

    key_order = ("fsdp_config", "ulysses_sequence_parallel_size", "log_prob_micro_batch_size")

    fsdp_config: ForwardFSDPConfig = section(
        "Weight dtype and sharding of the reference model.",
        {
            "tensor_parallel_size": "${actor_rollout_ref.actor.fsdp_config.tensor_parallel_size}",
            "mixed_precision.param_dtype": "${actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype}",
        },
    )
    log_prob_micro_batch_size: int | None = REF_PASSES.global_size_key(None)
    log_prob_micro_batch_size_per_gpu: Annotated[int | None, Auto()] = REF_PASSES.size_key()
    log_prob_use_dynamic_bsz: Annotated[bool, Auto()] = REF_PASSES.dynamic_key(
        "${actor_rollout_ref.actor.use_dynamic_bsz}"
    )
    log_prob_max_token_len_per_gpu: Annotated[int, Auto()] = REF_PASSES.tokens_key(
        "${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}"
    )

    def sharding(self) -> ForwardFSDPConfig:
        return self.fsdp_config


class ValKwargs(Section):
    do_sample: bool = key(False, "Sample the validation responses. false uses greedy decoding.")
    temperature: NonNegativeFloat = key(0, "Sampling temperature in validation. 0 uses greedy decoding.", unread=GREEDY)
    top_k: int = key(
        -1,
        "Number of most likely tokens to sample from in validation. 0 or -1 samples from all tokens.",
        ge=-1,
        unread=GREEDY,
    )
    top_p: PositiveFraction = key(
        1.0,
        "Cumulative probability of the most likely tokens to sample from in validation (nucleus sampling). 1 samples "
        "from all tokens.",
        unread=GREEDY,
    )
    min_p: Fraction = key(
        0.0,
        "Minimum probability of a token in validation, relative to the most likely token. 0 samples from all tokens.",
        unread=GREEDY,
    )
    repetition_penalty: PositiveFloat = key(
        1.0, "Penalty in validation on tokens of the prompt and the response. 1 disables it."
    )
    presence_penalty: Penalty = key(0.0, "Penalty in validation on tokens of the response. 0 disables it.")
    frequency_penalty: Penalty = key(
        0.0, "Penalty in validation on each occurrence of a token in the response. 0 disables it."
    )
    stop: Names = key("${actor_rollout_ref.rollout.stop}", "Strings that end a validation response.")
    stop_token_ids: TokenIDs = key(
        "${actor_rollout_ref.rollout.stop_token_ids}",
        "Token IDs that end a validation response, in addition to the end-of-sequence tokens of the model.",
    )
    n: Count = key(1, "Number of responses to generate per validation prompt.")

    def problems(self) -> Iterator[Problem]:
        if self.do_sample and self.temperature == 0:
            message = "has no effect with [temperature]=0. Set [temperature]=1.0."
            yield Problem("do_sample", self.do_sample, message, ("temperature",))
        if self.n > 1 and not self.do_sample:
            message = (
                f"greedy decoding generates {self.n} identical responses per prompt. Set [do_sample]=true "
                "[temperature]=1.0."
            )
            yield Problem("n", self.n, message, ("do_sample",))


class GeneratorConfig(Section):
    """Settings of the rollout backend, in training and in `camshaft generate`."""

    name: Annotated[Text, Auto()] = key(
        "auto",
        "Rollout backend: vllm, torch (built in), server, hf (transformers.generate), another registered name, or an "
        "import path package.module:Class. auto selects vllm on an accelerator if vLLM is installed, and torch "
        "otherwise.",
        short=("rollout", "rollout backend, which generates the responses"),
    )
    n: Annotated[Count, Auto()] = key(
        "auto",
        "Number of responses to generate per prompt. auto is 8 if the responses to a prompt are compared with each "
        "other (GRPO and other group estimators, estimators that are not built in, dynamic sampling), and 1 "
        "otherwise. Group estimators require more than 1.",
        short=("n", "responses per prompt"),
    )
    temperature: Annotated[float, Described("a number > 0 (greedy decoding: do_sample=false)")] = key(
        1.0,
        "Sampling temperature. In training, logits are divided by the same temperature before log-probs are computed.",
        gt=0,
    )
    top_k: int = key(
        -1, "Number of most likely tokens to sample from. 0 or -1 samples from all tokens.", ge=-1, unread=GREEDY
    )
    top_p: PositiveFraction = key(
        1.0,
        "Cumulative probability of the most likely tokens to sample from (nucleus sampling). 1 samples from all "
        "tokens.",
        unread=GREEDY,
    )
    min_p: Fraction = key(
        0.0,
        "Minimum probability of a token, relative to the most likely token. 0 samples from all tokens. Like the "
        "penalties, it requires a rollout that supports it (torch, hf, vllm, server).",
        unread=GREEDY,
    )
    repetition_penalty: PositiveFloat = key(
        1.0,
        "Penalty on tokens of the prompt and the response: positive logits are divided by it, others are multiplied "
        "by it. 1 disables it.",
    )
    presence_penalty: Penalty = key(0.0, "Number to subtract from the logits of tokens in the response. 0 disables it.")
    frequency_penalty: Penalty = key(
        0.0, "Number to subtract from the logit of a token for each of its occurrences in the response. 0 disables it."
    )
    stop: Names = key(
        None,
        "Strings that end a response. The token that completes a string is kept. null ends responses at the "
        "end-of-sequence token only.",
    )
    stop_token_ids: TokenIDs = key(
        None, "Token IDs that end a response, in addition to the end-of-sequence tokens of the model."
    )
    prompt_length: Annotated[Count, Auto()] = key(
        "auto",
        "Maximum prompt length in tokens. auto is the length of the longest prompt of the data, but at most 4096 "
        "tokens, and at most the positions of the model minus the response length.",
        short=("prompt_length", "maximum prompt length in tokens"),
    )
    response_length: Count = key(
        512,
        "Maximum response length in tokens. Generation stops at this length.",
        short=("response_length", "maximum response length in tokens"),
    )
    dtype: Annotated[DType, Auto()] = key(
        "auto",
        "Dtype of the weights in the rollout backend. It should equal the dtype in which the actor computes. auto is "
        "that dtype; without an actor it is bfloat16 on an accelerator and float32 on a CPU.",
    )
    gpu_memory_utilization: PositiveFraction = key(
        0.5,
        "Fraction of device memory that weights and KV cache of the rollout may use (vllm, sglang, and torch on a "
        "GPU). Rows that do not fit wait.",
    )
    ignore_eos: bool = key(False, "Continue to generate after the end-of-sequence token.")
    enforce_eager: Annotated[bool, Auto()] = key(
        "auto",
        "Run the model eagerly, without CUDA graphs and compilation (vllm, sglang, and torch on a GPU). auto is "
        "false on an accelerator.",
    )
    free_cache_engine: bool = key(True, "Free the KV cache after generation, so that training can use the memory.")
    load_format: LoadFormat = key(
        "dummy_dtensor",
        "Initial weights of the rollout backend (vllm, server and sglang only). dummy_* formats start with "
        "uninitialized weights, which the first weight sync replaces; the other formats load the weights from the "
        "model folder. megatron and dummy_megatron require an actor with strategy=megatron. The format does not "
        "change what a weight sync sends.",
    )
    tensor_model_parallel_size: Count = key(
        1,
        "Tensor-parallel size of the rollout backend: number of consecutive ranks per vLLM engine, or of processes "
        "per SGLang engine.",
    )
    enable_prefix_caching: bool = key(True, "Reuse the KV cache of shared prompt prefixes (vllm and sglang only).")
    update_weights_bucket_megabytes: Count = key(
        512,
        "Size in megabytes of the buckets in which weights are sent to a rollout backend in another process. Two "
        "buckets are in memory during a sync, because one is filled while the other is loaded.",
    )
    max_num_batched_tokens: Count = key(8192, "Maximum number of prompt tokens per prefill step on each rank.")
    max_num_seqs: Count = key(1024, "Maximum number of sequences decoded concurrently on each rank.")
    do_sample: bool = key(True, "Sample the responses. false uses greedy decoding.")
    engine_kwargs: dict[str, Any] = key(
        {},
        "Options passed to the rollout backend (vllm, sglang, server or a custom one). torch and hf accept no options.",
    )
    multi_turn: MultiTurnConfig = section("Episodes of several turns with an environment or a program.")

    def problems(self) -> Iterator[Problem]:
        if self.n > 1 and not self.do_sample:
            message = (
                f"greedy decoding generates {self.n} identical responses per prompt. Set [do_sample]=true, or [n]=1."
            )
            yield Problem("n", self.n, message, ("do_sample",))


class RolloutConfig(GeneratorConfig):
    """Rollout: generation of the responses in training."""

    resource_pool: Text = key(
        ROLLOUT_POOL,
        "Resource pool of the rollout with hybrid_engine=false: a name defined in trainer.resource_pools, and selected "
        "by no other role. On a CPU, the pool rollout has one process unless it is defined.",
    )
    max_restarts: NonNegativeInt = key(
        3,
        "Number of times in a row that the processes of a rollout on devices of its own are started again after one of "
        "them, or their server, has died, and repeat the calls that were not finished. "
        "With 0, a death ends the run.",
    )
    enable_return_routed_experts: bool = key(
        False,
        "Return the experts that a mixture of experts chose for each token, and log how many of them the actor "
        "chooses differently. Enabled by actor.router_replay.mode=R3. See moe.md.",
    )
    lora_weights: Literal["merged", "adapter"] = key(
        "merged",
        "Weights sent in a weight sync with model.lora_rank > 0. merged sends all weights with the adapter merged "
        "into them; adapter (vllm only) sends the base model once, and then only the adapter.",
    )
    log_prob_micro_batch_size: int | None = OLD_LOG_PROBS.global_size_key(None)
    log_prob_micro_batch_size_per_gpu: Annotated[int | None, Auto()] = OLD_LOG_PROBS.size_key()
    log_prob_use_dynamic_bsz: Annotated[bool, Auto()] = OLD_LOG_PROBS.dynamic_key(
        "${actor_rollout_ref.actor.use_dynamic_bsz}", "Applies when old log-probs are recomputed. "
    )
    log_prob_max_token_len_per_gpu: Annotated[int, Auto()] = OLD_LOG_PROBS.tokens_key(
        "${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}"
    )
    val_kwargs: ValKwargs = section("Sampling parameters in validation. By default, one greedy response per prompt.")


class ActorRolloutRefConfig(PooledSection):
    """Actor, rollout and reference policy, which use the same model."""

    worker_cls: Text | None = key(
        None,
        "Import path package.module:Class of the worker that runs actor, rollout and reference. null uses "
        "ActorRolloutRefWorker.",
    )
    hybrid_engine: bool = key(
        True,
        "Generate on the devices of the actor. false generates on devices of its own, those of rollout.resource_pool, "
        "and sends the weights through host memory.",
    )
    model: PolicyModelConfig = section(
        "Model of actor, rollout and reference.",
    )
    actor: ActorConfig = section("Actor: training of the policy.")
    ref: RefConfig = section(
        "Frozen reference policy for the KL divergence. Not read with model.lora_rank > 0, because the reference is "
        "then the actor with its adapter disabled.",
        {
            "ulysses_sequence_parallel_size": "${actor_rollout_ref.actor.ulysses_sequence_parallel_size}",
            "use_torch_compile": "${actor_rollout_ref.actor.use_torch_compile}",
            "engine_kwargs": "${actor_rollout_ref.actor.engine_kwargs}",
        },
    )
    rollout: RolloutConfig = section(
        "Rollout: generation of the responses.",
        {"response_length": "${data.max_response_length}"},
    )


class CriticModelConfig(ResponsesModelConfig):
    """Model of the critic: a language model with a value head that computes one value per token."""

    tokenizer_path: Path = key(
        "${actor_rollout_ref.model.path}",
        "Path of the critic's tokenizer. It must map text to the same token IDs as the actor's tokenizer.",
    )
    fsdp_config: FSDPConfig = section("Weight dtype and sharding of the critic.")


class CriticConfig(PooledSection, PPOUpdateSection):
    """Critic: training of the value function, if the advantage estimator reads values (gae or a custom one)."""

    key_order = (
        "enable", "resource_pool", "worker_cls", "strategy", "optim", "ppo_mini_batch_size", "ppo_micro_batch_size",
        "forward_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu",
        "ppo_epochs", "grad_clip", "cliprange_value", "loss_agg_mode", "ulysses_sequence_parallel_size", "checkpoint",
    )  # fmt: skip

    enable: bool | None = key(
        None,
        "Train a critic. null trains one only with algorithm.adv_estimator=gae. Set true for a custom estimator that "
        "reads values.",
    )
    worker_cls: Text | None = key(
        None, "Import path package.module:Class of the worker that runs the critic. null uses CriticWorker."
    )
    optim: OptimSection = section("Optimizer and learning-rate schedule of the critic.")
    model: CriticModelConfig = section(
        "Model of the critic.",
        {
            "path": "${actor_rollout_ref.model.path}",
            "download": "${actor_rollout_ref.model.download}",
            "external_lib": "${actor_rollout_ref.model.external_lib}",
            "trust_remote_code": "${actor_rollout_ref.model.trust_remote_code}",
        },
    )
    ppo_mini_batch_size: Count = key(
        "${actor_rollout_ref.actor.ppo_mini_batch_size}",
        "Number of prompts per optimizer step, summed over all ranks. Each prompt contributes rollout.n sequences.",
    )
    forward_micro_batch_size: int | None = VALUES.global_size_key("${critic.ppo_micro_batch_size}")
    forward_micro_batch_size_per_gpu: Annotated[int | None, Auto()] = VALUES.size_key(
        "${critic.ppo_micro_batch_size_per_gpu}"
    )
    use_dynamic_bsz: Annotated[bool, Auto()] = UPDATES.dynamic_key(
        "${actor_rollout_ref.actor.use_dynamic_bsz}",
        "Also limits the passes that compute values (forward_max_token_len_per_gpu). ",
    )
    forward_max_token_len_per_gpu: Annotated[int, Auto()] = VALUES.tokens_key("${critic.ppo_max_token_len_per_gpu}")
    cliprange_value: PositiveFloat = key(
        0.5, "Clip range of the value loss: new values are clipped to the interval old values +- cliprange_value."
    )

    def sharding(self) -> FSDPConfig:
        return self.model.fsdp_config

    def engine_keys(self) -> dict[str, Any]:
        return super().engine_keys() | {"activation_offload": self.model.enable_activation_offload}
