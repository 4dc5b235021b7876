"""The actor: the policy that is trained.

Reads `prompts`, `responses`, `response_mask`; for an update also `old_log_probs`, `advantages` and, with a
KL loss of the tokens drawn, `ref_log_prob`, and where samples are corrected for the rollout's distribution,
`rollout_is_weights` and `rollout_rs_mask`. Writes `old_log_probs` and `entropy`: before the update, or, where the
update is one optimizer step and was not told the old log-probs, in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from camshaft.algorithms import POLICY_LOSSES, Clip, PolicyLoss, entropy_loss, full_kl_loss, kl_loss
from camshaft.config import PPOConfig, Topology, actor_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, build_engine
from camshaft.engine.base import Output, PreprocessFn
from camshaft.errors import BatchError
from camshaft.plugins import load_function
from camshaft.roles.base import TrainedRole, UpdatePlan, counts_of, of_responses


class ActorWorker(TrainedRole):
    """Policy, optimizer and PPO update."""

    def __init__(self, config: PPOConfig, topology: Topology, total_steps: int):
        super().__init__()
        self.config, self.topology = config, topology
        self.actor = config.actor_rollout_ref.actor
        self.correction = config.algorithm.rollout_correction
        mode = self.actor.policy_loss.loss_mode
        self.policy_loss: PolicyLoss = load_function(mode, POLICY_LOSSES, "camshaft.policy_losses")
        self.engine = build_engine(self.actor.strategy, actor_engine(config, topology, total_steps))
        self.computes_in = self.actor.fsdp_config.computes_in()

    @property
    def temperature(self) -> float:
        return self.config.actor_rollout_ref.rollout.temperature

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropy` of the responses, at the temperature they were sampled with."""
        found = self.infer(data, StepContext(outputs=("log_probs", "entropy"), temperature=self.temperature))
        return _told(found, data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(
        self, data: DataProto, seed: int = 0, dealt: bool = False, before: PreprocessFn | None = None
    ) -> DataProto:
        """PPO on the batch; `meta_info["metrics"]` says what happened.

        Where the config `learns_at_once`, a batch may come without `old_log_probs`: they are what the update's forward
        pass finds. The ratio is 1, with the gradient of the log-prob, and what `compute_log_prob` tells comes back.

        Mini-batches are drawn by `seed`, on each rank from its own rows. With `dealt` the rows are in the order in
        which they are to be learned, for the same mini-batches on any number of ranks (`trainer/mini_batches.py`).
        `before`
        is run on each micro-batch: a KL over the whole vocabulary needs that of `exact_kl.compared`.
        """
        at_once = "old_log_probs" not in data and self.config.learns_at_once()
        wanted = ["prompts", "responses", "response_mask", "advantages"]
        if not at_once:
            wanted.append("old_log_probs")
        if self.config.needs_sampled_kl_loss():
            wanted.append("ref_log_prob")
        if self.correction.rollout_is:
            wanted.append("rollout_is_weights")
        learn = data.select(*wanted)
        if self.correction.rollout_rs:  # what is rejected counts nowhere: not in the loss, not in what it is divided by
            kept, mask = data.ragged("rollout_rs_mask"), data.ragged("response_mask")
            learn = learn.with_columns(response_mask=mask.like(mask.values & kept.values))
        plan = UpdatePlan(
            mini_batch_size=self.config.actor_mini_batch_per_rank(self.topology),
            epochs=self.actor.ppo_epochs,
            seed=seed if self.actor.shuffle else None,
        ).of(dealt)
        if at_once:
            if len(data) > plan.mini_batch_size:
                raise BatchError(
                    f"{len(data)} rows are more than a mini-batch of {plan.mini_batch_size}: such an update needs "
                    "old_log_probs, so call compute_log_prob before it"
                )
            plan = replace(plan, seed=None)  # what comes back is in the order of the rows
        outputs: list[Output] = ["log_probs"]
        if self.actor.entropy_coeff or at_once or self.correction.bypass_mode:
            outputs.append("entropy")
        if self.config.needs_full_kl_loss():
            outputs.append("full_kl")
        ctx = StepContext(outputs=tuple(outputs), temperature=self.temperature)
        found: list[Mapping[str, Any]] | None = [] if at_once else None
        metrics = self.update(learn, self._loss, ctx, plan, before, found)
        told = _told(found[0], data) if found else DataProto({})
        return told.with_meta(metrics={f"actor/{name}": value for name, value in metrics.items()})

    def _loss(self, data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        """Policy loss, minus entropy, plus KL to the reference, each aggregated in the same way."""
        actor, mode = self.actor, self.actor.loss_agg_mode
        counts = counts_of(data, ctx, horizon=self.config.data.max_response_length)
        log_probs = of_responses(predictions, "log_probs", data).values
        old = data["old_log_probs"].values if "old_log_probs" in data else log_probs.detach()
        low, high = actor.clip_range()
        loss, metrics = self.policy_loss(
            log_probs,
            old,
            data["advantages"].values,
            counts,
            clip=Clip(low, high, actor.clip_ratio_c),
            mode=mode,
            weights=data["rollout_is_weights"].values if self.correction.rollout_is else None,
        )
        metrics["pg_loss"] = loss
        if actor.entropy_coeff:
            entropy = entropy_loss(of_responses(predictions, "entropy", data).values, counts, mode=mode)
            loss = loss - actor.entropy_coeff * entropy
        if self.correction.bypass_mode:  # no pass before the update tells it
            entropy = of_responses(predictions, "entropy", data).values.detach()
            metrics["entropy"] = entropy_loss(entropy, counts, mode="token-mean")
        if actor.use_kl_loss:
            if self.config.needs_full_kl_loss():
                distance = full_kl_loss(of_responses(predictions, "full_kl", data).values, counts, mode=mode)
            else:
                distance = kl_loss(log_probs, data["ref_log_prob"].values, counts, kind=actor.kl_loss_type, mode=mode)
            loss = loss + actor.kl_loss_coef * distance
            metrics["kl_loss"] = distance
        ctx["metrics"] = metrics
        return loss, ctx


def _told(found: Mapping[str, Any], data: DataProto) -> DataProto:
    """What predictions say of the policy that drew the responses."""
    return DataProto.from_dict(
        {
            "old_log_probs": of_responses(found, "log_probs", data).to("cpu"),
            "entropy": of_responses(found, "entropy", data).to("cpu"),
        }
    )
