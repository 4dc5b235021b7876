"""PPO and its kin: the step, and the loop around it.

    with PPOParts(config) as parts, Tracking(...) as tracking:
        trainer = PPOTrainer(config, parts)
        trainer.prepare()
        trainer.fit(tracking)

`step` is the algorithm, phase by phase; each phase adds columns to the batch (the table is in
`columns.py`). The roles decide how a phase is computed, `advantages.py` holds what the driver computes.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from camshaft.checkpoint import Saved
from camshaft.config import PPOConfig
from camshaft.controller import Pending, submit
from camshaft.dataproto import DataProto
from camshaft.tracking import Tracking
from camshaft.trainer.advantages import build_kl_controller, estimate, token_rewards
from camshaft.trainer.correction import correct
from camshaft.trainer.deal import deal
from camshaft.trainer.metrics import StepMetrics, batch_metrics
from camshaft.trainer.parts import PPOParts
from camshaft.trainer.seeds import sampling_seeds, shuffle_seed
from camshaft.trainer.session import told_resume
from camshaft.trainer.validate import save_samples, validate

SEQUENCES = ("prompts", "responses", "response_mask")
"""The columns that a role needs to run its model over the batch."""


DRIVER_ONLY = (
    *("uid", "data_source", "ground_truth", "extra_info", "sampling_seed"),
    *("raw_prompt", "raw_input_ids", "rm_scores", "rm_truncated"),
)
"""Columns that nobody learns from: they need not travel to the ranks."""


class PPOTrainer:
    """One run."""

    def __init__(self, config: PPOConfig, parts: PPOParts):
        self.config, self.parts = config, parts
        self.actor, self.critic, self.rewards = parts.actor, parts.critic, parts.rewards
        self.kl = build_kl_controller(config.algorithm)
        self.global_step = 0

    # -- the algorithm ----------------------------------------------------------------------------

    def step(self, prompts: DataProto) -> dict[str, float]:
        """One iteration: generate, score, evaluate, estimate advantages, update critic and actor."""
        config, metrics = self.config, StepMetrics()
        with metrics.phase("gen"):
            batch = self._one_row_per_response(prompts)
            asked = batch.select("prompts", "sampling_seed")
            batch = metrics.union(batch, self.actor.generate_sequences(asked, recompute_log_prob=False))
        batch = self._evaluated(batch, metrics)
        with metrics.phase("adv"):
            rewards, penalty = token_rewards(batch, config.algorithm, self.kl)
            batch = batch.union(rewards)
            batch = batch.union(estimate(batch, config.algorithm))
            corrected, told = correct(batch, config.algorithm.rollout_correction)
            batch = batch.union(corrected)
            metrics.add(penalty | told)
        learn = batch.drop(*DRIVER_ONLY)
        self._update(learn, metrics)
        metrics.add(batch_metrics(batch))
        return metrics.finished(batch)

    def _evaluated(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """The batch with scores, old log-probs, and the reference's and the critic's opinion of it.

        Nobody here waits for another: roles on devices of their own work at the same time, and the scoring functions,
        which run beside the driver, while all of them do. A phase's time is what the driver waited for it.
        """
        sequences = batch.select(*SEQUENCES)
        pending: dict[str, Pending[DataProto]] = {}
        with metrics.phase("old_log_prob"):
            pending["old_log_prob"] = submit(self.actor.compute_log_prob, sequences)
        if self.config.needs_reference():
            with metrics.phase("ref"):
                pending["ref"] = submit(self.actor.compute_ref_log_prob, sequences)
        if self.critic is not None:
            with metrics.phase("values"):
                pending["values"] = submit(self.critic.compute_values, sequences)
        with metrics.phase("reward"):
            batch = self.parts.model_scored(batch)
            scored = self.rewards.score(batch, self.parts.decode)
            batch = batch.with_columns(token_level_scores=scored.token_level_scores)
            metrics.add(scored.metrics)
        for phase, evaluation in pending.items():
            with metrics.phase(phase):
                batch = metrics.union(batch, evaluation.result())
        return batch

    def _update(self, learn: DataProto, metrics: StepMetrics) -> None:
        """Train critic and actor, at the same time where they have devices of their own."""
        critic = None
        if self.critic is not None:
            with metrics.phase("update_critic"):
                critic = submit(self.critic.update_critic, self._for_critic(learn), dealt=True)
        if self.global_step > self.config.trainer.critic_warmup:
            with metrics.phase("update_actor"):
                actor = submit(self.actor.update_actor, self._for_actor(learn), dealt=True)
                metrics.add(actor.result().meta_info["metrics"])
        if critic is not None:
            with metrics.phase("update_critic"):
                metrics.add(critic.result().meta_info["metrics"])

    def _one_row_per_response(self, prompts: DataProto) -> DataProto:
        """Each prompt `rollout.n` times, with a seed for each response."""
        rows = prompts.repeat(self.config.actor_rollout_ref.rollout.n)
        seeds = sampling_seeds(self.config.trainer.seed, self.global_step, len(rows))
        return rows.with_columns(sampling_seed=seeds)

    def _for_actor(self, batch: DataProto) -> DataProto:
        """The rows of the actor's mini-batches, dealt to its ranks."""
        actor, dp_size = self.config.actor_rollout_ref.actor, self.parts.actor_dp_size
        return deal(batch, self.config.actor_mini_batch(), actor.ppo_epochs, self._order(actor.shuffle), dp_size)

    def _for_critic(self, batch: DataProto) -> DataProto:
        """The same of the critic."""
        critic, dp_size = self.config.critic, self.parts.critic_dp_size
        return deal(batch, self.config.critic_mini_batch(), critic.ppo_epochs, self._order(critic.shuffle), dp_size)

    def _order(self, shuffle: bool) -> int | None:
        return shuffle_seed(self.config.trainer.seed, self.global_step) if shuffle else None

    # -- the loop ---------------------------------------------------------------------------------

    def prepare(self) -> Saved | None:
        """Build the models and, if there is something to resume from, load it."""
        building = [submit(role.init_model) for role in self.parts.roles()]
        for model in building:
            model.result()
        saved = self._saved()
        if saved is not None:
            self.actor.load_checkpoint(saved.role("actor"))
            if self.critic is not None:
                self.critic.load_checkpoint(saved.role("critic"))
            self.parts.loader.load_state_dict(saved.state["loader"])
            self.kl.load_state_dict(saved.state["kl"])
            self.global_step = saved.step
            told_resume(saved, self.parts.total_steps)
        if self.config.trainer.resume_mode != "auto":
            self.parts.checkpoints.put_aside(after=self.global_step)
        return saved

    def fit(self, tracking: Tracking) -> dict[str, float]:
        """Train to the end; returns the metrics of the last step."""
        trainer, total = self.config.trainer, self.parts.total_steps
        metrics: dict[str, float] = {}
        if trainer.val_before_train and self.global_step == 0:
            tracking.log(self.validate(tracking), step=0)
        for prompts in self.parts.loader:
            if self.global_step >= total:
                break
            self.global_step += 1
            metrics = self.step(prompts)
            last = self.global_step == total or self.parts.loader.exhausted
            if trainer.test_freq > 0 and (last or self.global_step % trainer.test_freq == 0):
                metrics |= self.validate(tracking)
            tracking.log(metrics, step=self.global_step)
            if trainer.save_freq > 0 and (last or self.global_step % trainer.save_freq == 0):
                self.save()
        return metrics

    def validate(self, tracking: Tracking) -> dict[str, float]:
        """Score the held-out prompts; the first responses go to `validation/step_<n>.jsonl` and to the trackers."""
        metrics, samples = validate(self.parts, self.config)
        if samples:
            tracking.log_generations([asdict(sample) for sample in samples], step=self.global_step)
            folder = Path(self.config.trainer.default_local_dir) / "validation"
            save_samples(samples, folder / f"step_{self.global_step}.jsonl")
        return metrics

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self) -> None:
        """All state of the run, whole or not at all."""
        trainer, step = self.config.trainer, self.global_step
        roles = {"actor": partial(self.actor.save_checkpoint, global_step=step)}
        if self.critic is not None:
            roles["critic"] = partial(self.critic.save_checkpoint, global_step=step)
        state = {"loader": self.parts.loader.state_dict(), "kl": self.kl.state_dict()}
        keep = {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}
        exports = {"actor": self.actor.export} if self.config.actor_rollout_ref.actor.checkpoint.with_hf_model() else {}
        if self.critic is not None and self.config.critic.checkpoint.with_hf_model():
            exports["critic"] = self.critic.export
        self.parts.checkpoints.save(step, roles, state, keep, exports)

    def _saved(self) -> Saved | None:
        trainer, checkpoints = self.config.trainer, self.parts.checkpoints
        if trainer.resume_mode == "disable":
            return None
        if trainer.resume_mode == "resume_path":
            assert trainer.resume_from_path is not None, "the config was checked"
            return checkpoints.open(trainer.resume_from_path)
        return checkpoints.latest()
