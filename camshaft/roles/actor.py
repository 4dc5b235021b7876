"""Roles of the policy: the trained actor and the frozen reference.

    ref = RefWorker(config, topology) if config.kl_plan().needs_model else AdapterlessRef(config, actor.engine)

`compute_log_prob` reads the columns `prompts`, `responses` and `response_mask`, and writes `old_log_probs`, `entropy`
and, for an optimal token baseline, `sum_pi_squared`. `compute_ref_log_prob` reads the same columns and writes
`ref_log_prob`. `update_actor` also reads `advantages` and `old_log_probs`. With a KL loss on the sampled tokens it
reads `ref_log_prob`, and with rollout correction `rollout_is_weights` and `rollout_rs_mask`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

from torch import Tensor

from camshaft.algorithms import (
    POLICY_LOSSES,
    Clip,
    Counts,
    PolicyLoss,
    entropy_loss,
    full_kl_loss,
    gpg_loss,
    kl_loss,
)
from camshaft.algorithms.losses import LossAndMetrics
from camshaft.config import PPOConfig, Topology, actor_engine, ref_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import BaseEngine, Output, RoutingMode, StepContext, build_engine
from camshaft.engine.base import PreprocessFn
from camshaft.errors import BatchError, ConfigError
from camshaft.plugins import load_function
from camshaft.roles.base import EngineRole, TrainedRole, loss_counts, mini_batches, select_responses, token_columns
from camshaft.roles.bypass import BypassCorrection
from camshaft.roles.exact_kl import reference_distribution
from camshaft.roles.sequences import with_lengths
from camshaft.roles.token_selection import selected_tokens

OldLogProbs = Literal["actor", "update", "rollout"]
"""Source of the old log-probs, as returned by `PPOConfig.old_log_prob_source`."""

PREDICTED = {
    "log_probs": "old_log_probs",
    "entropy": "entropy",
    "sum_pi_squared": "sum_pi_squared",
    "routing_mismatch": "routing_mismatch",
}
"""Maps outputs of the engine to columns of the policy before the update."""


class ActorWorker(TrainedRole):
    """The trained policy with its optimizer and the PPO update."""

    reference: EngineRole | None = None
    """Reference in the same process, whose distribution an exact KL loss needs."""

    def __init__(self, config: PPOConfig, topology: Topology, total_steps: int):
        super().__init__()
        self.config, self.actor = config, config.actor_rollout_ref.actor
        self.mini_batch_size = config.actor_mini_batch_per_rank(topology)
        self.clip = Clip(*self.actor.clip_range(), self.actor.clip_ratio_c)
        self.correction = config.algorithm.rollout_correction
        self.kl = config.kl_plan()
        self.bypass = BypassCorrection.of(self.correction)
        self.policy_loss, self.aggregation = self._load_policy_loss(), self.actor.aggregation()
        self.loss_columns = self._list_loss_columns()
        self.entropy_coeff = self.actor.entropy_coeff
        self.select = partial(selected_tokens, self.actor.policy_loss) if config.selects_tokens() else None
        self.engine = build_engine(self.actor.strategy, actor_engine(config, topology, total_steps))
        self.compute_dtype = self.actor.fsdp_config.compute_dtype()
        self.routing: RoutingMode | None = config.routing_mode()
        self.temperature = config.actor_rollout_ref.rollout.temperature
        squares: tuple[Output, ...] = ("sum_pi_squared",) if config.needs_sum_pi_squared() else ()
        self.log_prob_outputs: tuple[Output, ...] = ("log_probs", "entropy", *squares)

    def _load_policy_loss(self) -> PolicyLoss:
        """Return the policy loss with its settings."""
        loss = self.actor.policy_loss
        function = load_function(loss.loss_mode, POLICY_LOSSES, "camshaft.policy_losses")
        if self.correction.bypass_mode and self.correction.loss_type == "reinforce":
            return partial(gpg_loss, clip=self.clip, mode=self.actor.aggregation())
        return partial(function, clip=self.clip, mode=self.actor.aggregation(), **loss.parameters())

    def _list_loss_columns(self) -> list[str]:
        """Return the columns that the loss reads, besides the tokens and `old_log_probs`."""
        columns = ["advantages"]
        if self.kl.is_sampled_in_loss:
            columns.append("ref_log_prob")
        if self.correction.needs_mean_weight():
            columns.append("rollout_is_mean")
        columns += ["policy_ages"] * self.correction.interpolates()
        if self.correction.is_enabled():
            columns += ["rollout_is_weights"] * (self.correction.rollout_is is not None)
            columns += ["rollout_rs_mask"] * bool(self.correction.rollout_rs)
        if self.config.selects_tokens():
            columns += ["selected_tokens"] * self.actor.policy_loss.selects_by_covariance()
            columns += ["high_entropy"] * (self.actor.policy_loss.top_entropy_quantile < 1)
        return columns

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute the columns `old_log_probs` and `entropy` of the responses at the sampling temperature.

        For an optimal token baseline, also compute `sum_pi_squared`. If the batch has the column `routed_experts`, also
        compute `routing_mismatch`.
        """
        ctx = self._context(*self.log_prob_outputs, routing=self.routing)
        return _policy_columns(self.infer(data, ctx), data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(
        self,
        data: DataProto,
        seed: int = 0,
        presharded: bool = False,
        old_log_probs: OldLogProbs = "actor",
        entropy_coeff: float | None = None,
    ) -> DataProto:
        """Run the PPO update and return its metrics in `meta_info["metrics"]`.

        With `old_log_probs="update"`, the forward pass of the update also provides the old log-probs, so the ratio is 1
        and its gradient is that of the log-prob. The batch must then be a single mini-batch. Otherwise, the update
        reads the column `old_log_probs`. Unless `compute_log_prob` computed it ("actor"), the result has the columns of
        `compute_log_prob` for the rows of the first mini-batch, which the update computes before it changes a weight.

        By default, each rank shuffles its own rows with `seed`. If `presharded` is True, the rows are already in the
        order of the mini-batches of all epochs, so that mini-batches do not depend on the number of ranks
        (`trainer/mini_batches.py`). `entropy_coeff` replaces the coefficient of the config.
        """
        self.entropy_coeff = self.actor.entropy_coeff if entropy_coeff is None else entropy_coeff
        in_update = old_log_probs == "update"
        routing = self.routing if in_update or self.routing == "replay" else None
        old = [] if in_update else ["old_log_probs"]
        rows = data.select(
            *token_columns(data), *self.loss_columns, *old, *([] if routing is None else ["routed_experts"])
        )
        if "rollout_rs_mask" in rows:  # rejected tokens are excluded from the loss and from its denominators
            accepted, mask = rows.ragged("rollout_rs_mask"), rows.ragged("response_mask")
            rows = rows.with_columns(response_mask=mask.like(mask.values & accepted.values))
        if in_update and len(data) > self.mini_batch_size:
            raise BatchError(
                f"the batch of {len(data)} rows exceeds one mini-batch of {self.mini_batch_size} rows, the limit with "
                "old_log_probs='update'; call compute_log_prob before the update"
            )
        # If the update computes the old log-probs, it returns them in the order of the rows.
        order = seed if self.actor.shuffle and not in_update else None
        outputs: list[Output] = ["log_probs"]
        if self.entropy_coeff or old_log_probs != "actor":
            outputs.append("entropy")
        if self.kl.in_loss == "full":
            outputs.append("full_kl")
        ctx = self._context(*outputs, routing=routing)
        loss, result = partial(self._loss, old_log_probs), DataProto({})
        with self._reference_distribution() as preprocess, self.update() as metrics:
            for mini_batch in mini_batches(rows, self.mini_batch_size, self.actor.ppo_epochs, order, presharded):
                step = self.engine.train_batch(mini_batch, ctx, loss, preprocess)
                metrics.add(step)
                if old_log_probs != "actor" and not result.columns:
                    result = _policy_columns(step.predictions, mini_batch)
        return result.with_meta(metrics=metrics.result("actor"))

    def _reference_distribution(self) -> AbstractContextManager[PreprocessFn | None]:
        """Return the context of a hook that adds the distribution of the reference; None without an exact KL loss."""
        if self.reference is None or self.kl.in_loss != "full":
            return nullcontext()
        return reference_distribution(self.reference, self.temperature)

    def _context(self, *outputs: Output, routing: RoutingMode | None) -> StepContext:
        ctx = StepContext(outputs=outputs, temperature=self.temperature)
        if routing is not None:
            ctx["routing"] = routing
        return ctx

    def _loss(
        self, source: OldLogProbs, data: DataProto, predictions: Any, ctx: StepContext
    ) -> tuple[Tensor, StepContext]:
        """Compute the policy loss minus the entropy bonus plus the KL loss, all with the same aggregation."""
        actor, mode = self.actor, self.aggregation
        counts = loss_counts(data, ctx, self.config.data.max_response_length)
        log_probs = select_responses(predictions, "log_probs", data).values
        old = log_probs.detach() if source == "update" else data["old_log_probs"].values
        loss, metrics = self._policy_loss(log_probs, old, data, counts)
        metrics["pg_loss"] = loss
        if self.entropy_coeff:
            entropy = entropy_loss(select_responses(predictions, "entropy", data).values, counts, mode=mode)
            loss = loss - self.entropy_coeff * entropy
        if source == "rollout":  # no other forward pass of the trainer computes the entropy
            entropy = select_responses(predictions, "entropy", data).values.detach()
            metrics["entropy"] = entropy_loss(entropy, counts, mode="token-mean")
        if actor.use_kl_loss:
            if self.kl.in_loss == "full":
                divergence = full_kl_loss(select_responses(predictions, "full_kl", data).values, counts, mode=mode)
            else:
                divergence = kl_loss(log_probs, data["ref_log_prob"].values, counts, kind=actor.kl_loss_type, mode=mode)
            loss = loss + actor.kl_loss_coef * divergence
            metrics["kl_loss"] = divergence
        ctx["metrics"] = metrics
        return loss, ctx

    def _policy_loss(self, log_probs: Tensor, old: Tensor, data: DataProto, counts: Counts) -> LossAndMetrics:
        """Compute the policy loss and its metrics, with rollout correction."""
        weights = data["rollout_is_weights"].values if "rollout_is_weights" in data else None
        corrections: dict[str, Tensor] = {}
        if self.bypass is not None:
            old, counts, weights, corrections = self.bypass.apply(log_probs, data, counts)
        options = {"weights": weights} if self.select is None else self.select(data, weights)
        result = self.policy_loss(log_probs, old, data["advantages"].values, counts, **options)
        loss, metrics = _checked_loss(self.actor.policy_loss.loss_mode, result)
        return loss, metrics | corrections


def _checked_loss(mode: str, result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the metrics that a policy loss returned. Raise ConfigError for other values."""
    parts = result if isinstance(result, tuple | list) else [result]
    if len(parts) == 2 and isinstance(parts[0], Tensor) and parts[0].numel() == 1 and isinstance(parts[1], dict):
        return parts[0], parts[1]
    returned = [f"tensor {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    raise ConfigError(
        f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} returned {', '.join(returned)}; return the loss, a "
        "scalar tensor, and a dict of metrics, which may be empty"
    )


class RefWorker(EngineRole):
    """The initial model of the actor, frozen and without an optimizer."""

    def __init__(self, config: PPOConfig, topology: Topology):
        super().__init__()
        self.config = config
        self.engine = build_engine(config.actor_rollout_ref.actor.strategy, ref_engine(config, topology))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute the column `ref_log_prob` of the responses at the sampling temperature."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        predictions = self.infer(data, StepContext(outputs=("log_probs",), temperature=temperature))
        return DataProto.from_dict({"ref_log_prob": select_responses(predictions, "log_probs", data).to("cpu")})


class AdapterlessRef(RefWorker):
    """Reference that uses the engine of the actor without its LoRA adapter, which saves a copy of the weights."""

    def __init__(self, config: PPOConfig, engine: BaseEngine):
        self.config, self.engine = config, engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Do nothing, because the actor builds the model."""

    def infer(self, data: DataProto, ctx: StepContext) -> Mapping[str, Any]:
        with self.engine.disable_adapter():
            return super().infer(data, ctx)


def _policy_columns(predictions: Mapping[str, Any], data: DataProto) -> DataProto:
    """Return the columns of the policy that are predicted, for the responses."""
    columns = {name: select_responses(predictions, name, data).to("cpu") for name in PREDICTED if name in predictions}
    if "row_lengths" in data.meta_info:
        columns = with_lengths(columns, data.meta_info["row_lengths"])
    return DataProto.from_dict({PREDICTED[name]: column for name, column in columns.items()})
