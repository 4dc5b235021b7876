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

from torch import Tensor

from camshaft.checkpoint import Saved
from camshaft.config import PPOConfig
from camshaft.controller import Pending, submit
from camshaft.dataproto import DataProto
from camshaft.rewards.manager import Begun, RewardResult
from camshaft.stop import Stop
from camshaft.tracking import Tracking
from camshaft.trainer.advantages import build_kl_controller, estimate, token_rewards
from camshaft.trainer.best import BestStep
from camshaft.trainer.build import PPOParts
from camshaft.trainer.dynamic_sampling import informative
from camshaft.trainer.metrics import StepMetrics, batch_metrics, mismatch
from camshaft.trainer.mini_batches import deal, dealt_rows
from camshaft.trainer.remax import with_baselines
from camshaft.trainer.resume import check_resume, remembered, told_resume
from camshaft.trainer.rollout_correction import correct
from camshaft.trainer.scoring import with_scores
from camshaft.trainer.seeds import sampling_seeds, shuffle_seed
from camshaft.trainer.validate import Sample, samples_of, save_samples, validate

SEQUENCES = ("prompts", "responses", "response_mask")
"""The columns that a role needs to run its model over the batch."""


DRIVER_ONLY = (
    *("uid", "data_source", "ground_truth", "extra_info", "sampling_seed"),
    *("prompt_id", "raw_prompt", "raw_input_ids", "rm_scores", "rm_truncated", "reward_baselines"),
)
"""Columns that nobody learns from: they need not travel to the ranks."""


class PPOTrainer:
    """One run."""

    def __init__(self, config: PPOConfig, parts: PPOParts):
        self.config, self.parts = config, parts
        self.actor, self.critic, self.rewards = parts.actor, parts.critic, parts.rewards
        self.kl = build_kl_controller(config.algorithm)
        self.best = BestStep(config.trainer.best_metric, config.trainer.best_metric_mode)
        self.global_step = 0

    # -- the algorithm ----------------------------------------------------------------------------

    def step(self, prompts: DataProto) -> dict[str, float]:
        """One iteration: generate, score, evaluate, estimate advantages, update critic and actor."""
        config, metrics = self.config, StepMetrics()
        if config.needs_greedy():
            prompts = with_baselines(prompts, self.parts, metrics)
        if config.algorithm.filter_groups.enable:
            batch, begun = informative(prompts, self._answered, self.parts.loader, config, metrics), None
        else:
            batch, begun = self._generated(prompts, metrics)
        batch = self._evaluated(batch, begun, metrics)
        with metrics.phase("adv"):
            rewards, penalty = token_rewards(batch, config.algorithm, self.kl)
            batch = batch.union(rewards)
            batch = batch.union(estimate(batch, config.algorithm))
            corrected, told = correct(batch, config.algorithm.rollout_correction)
            batch = batch.union(corrected)
            metrics.add(penalty | told)
        batch = batch.union(self._update(batch.drop(*DRIVER_ONLY), metrics))
        metrics.add(batch_metrics(batch))
        if not config.algorithm.rollout_correction.bypass_mode:
            metrics.add(mismatch(batch))
        return metrics.finished(batch)

    def _evaluated(self, batch: DataProto, begun: Begun | None, metrics: StepMetrics) -> DataProto:
        """The batch with scores, old log-probs unless the update finds them, and what reference and critic think of it.

        Nobody here waits for another: roles on devices of their own work at the same time, and the scoring functions,
        which run beside the driver, while all of them do. A phase's time is what the driver waited for it.
        """
        sequences = batch.select(*SEQUENCES)
        pending: dict[str, Pending[DataProto]] = {}
        if self.config.algorithm.rollout_correction.bypass_mode:
            batch = batch.with_columns(old_log_probs=batch["rollout_log_probs"])
        elif not (self.config.learns_at_once() and self._actor_learns()):
            with metrics.phase("old_log_prob"):
                pending["old_log_prob"] = submit(self.actor.compute_log_prob, sequences)
        if self.config.needs_ref_log_prob():
            with metrics.phase("ref"):
                pending["ref"] = submit(self.actor.compute_ref_log_prob, sequences)
        if self.critic is not None:
            with metrics.phase("values"):
                pending["values"] = submit(self.critic.compute_values, sequences)
        if "token_level_scores" not in batch:
            batch, _ = self._scored(batch, begun, metrics)
        for phase, evaluation in pending.items():
            with metrics.phase(phase):
                batch = metrics.union(batch, evaluation.result())
        if self.config.trainer.rollout_data_dir is not None:
            scores = batch.ragged("token_level_scores").sum()
            self._write(samples_of(self.parts, batch, scores), self.config.trainer.rollout_data_dir)
        return batch

    def _update(self, learn: DataProto, metrics: StepMetrics) -> DataProto:
        """Train critic and actor, at the same time where they have devices of their own.

        Returns the columns that the actor finds only now, where its update is one step; else none.
        """
        critic, found = None, DataProto({})
        if self.critic is not None:
            with metrics.phase("update_critic"):
                critic = submit(self.critic.update_critic, self._for_critic(learn), dealt=True)
        if self._actor_learns():
            with metrics.phase("update_actor"):
                rows = self._rows_of_actor(len(learn))
                told = submit(self.actor.update_actor, learn.reorder(rows), dealt=True).result()
                metrics.add(told.meta_info["metrics"])
                if told.columns:
                    found = DataProto(told.columns).reorder(rows.argsort())
        if critic is not None:
            with metrics.phase("update_critic"):
                metrics.add(critic.result().meta_info["metrics"])
        return found

    def _generated(
        self, prompts: DataProto, metrics: StepMetrics, first_row: int = 0
    ) -> tuple[DataProto, Begun | None]:
        """Each prompt `rollout.n` times with a response, and the scoring that has begun meanwhile.

        Rows before `first_row` were drawn earlier in the step.
        """
        with metrics.phase("gen"):
            rows = prompts.repeat(self.config.actor_rollout_ref.rollout.n)
            seeds = sampling_seeds(self.config.trainer.seed, self.global_step, len(rows), first_row)
            batch = rows.with_columns(sampling_seed=seeds)
            generated, begun = self.parts.generate(batch)
            return metrics.union(batch, generated), begun

    def _scored(self, batch: DataProto, begun: Begun | None, metrics: StepMetrics) -> tuple[DataProto, RewardResult]:
        """The batch with what its responses are worth, and how that came to be."""
        with metrics.phase("reward"):
            batch = self.parts.model_scored(batch)
            scored = self.rewards.score(batch, self.parts.decode, begun)
            self.parts.failed.add(scored.failures, f"step {self.global_step}")
            metrics.add(scored.metrics)
        return with_scores(batch, scored), scored

    def _answered(self, prompts: DataProto, metrics: StepMetrics, first_row: int) -> tuple[DataProto, RewardResult]:
        """Generated and scored, for dynamic sampling, which must know the scores before it goes on."""
        return self._scored(*self._generated(prompts, metrics, first_row), metrics)

    def _actor_learns(self) -> bool:
        return self.global_step > self.config.trainer.critic_warmup

    def _rows_of_actor(self, count: int) -> Tensor:
        """The rows of the actor's mini-batches, dealt to its ranks."""
        actor, dp_size = self.config.actor_rollout_ref.actor, self.parts.actor_dp_size
        return dealt_rows(count, self.config.actor_mini_batch(), actor.ppo_epochs, self._order(actor.shuffle), dp_size)

    def _for_critic(self, batch: DataProto) -> DataProto:
        """The rows of the critic's mini-batches, likewise."""
        critic, dp_size = self.config.critic, self.parts.critic_dp_size
        return deal(batch, self.config.critic_mini_batch(), critic.ppo_epochs, self._order(critic.shuffle), dp_size)

    def _order(self, shuffle: bool) -> int | None:
        return shuffle_seed(self.config.trainer.seed, self.global_step) if shuffle else None

    # -- the loop ---------------------------------------------------------------------------------

    def prepare(self) -> Saved | None:
        """Build the models and, if there is something to resume from, load it."""
        saved = self._saved()
        if saved is not None:
            check_resume(saved, self.config, ["actor", *([] if self.critic is None else ["critic"])])
        building = [submit(role.init_model) for role in self.parts.roles()]
        for model in building:
            model.result()
        if saved is not None:
            self.actor.load_checkpoint(saved.role("actor"))
            if self.critic is not None:
                self.critic.load_checkpoint(saved.role("critic"))
            self.parts.loader.load_state_dict(saved.state["loader"])
            self.kl.load_state_dict(saved.state["kl"])
            self.best.load_state_dict(saved.state["best"])
            self.global_step = saved.step
            told_resume(saved, self.parts.total_steps)
        if self.config.trainer.resume_mode != "auto" and not self.config.trainer.val_only:
            self.parts.checkpoints.put_aside(after=self.global_step)
        return saved

    def fit(self, tracking: Tracking, stop: Stop | None = None) -> dict[str, float]:
        """Train to the end or until it is asked to stop, or validate alone; returns the metrics of the last step."""
        trainer, total, stop = self.config.trainer, self.parts.total_steps, stop or Stop()
        metrics: dict[str, float] = {}
        if trainer.val_only or (trainer.val_before_train and self.global_step == 0):
            metrics = self.validate(tracking)
            tracking.log(metrics, step=self.global_step)
            if trainer.val_only:
                return metrics
            self.best.offer(metrics, step=0)
        for prompts in self.parts.loader:
            if self.global_step >= total:
                break
            self.global_step += 1
            metrics = self.step(prompts)
            last = self.global_step == total or self.parts.loader.exhausted
            due = trainer.save_freq > 0 and (last or self.global_step % trainer.save_freq == 0)
            if trainer.test_freq > 0 and (last or self.global_step % trainer.test_freq == 0):
                validated = self.validate(tracking)
                due = self.best.offer(validated, self.global_step) or due
                metrics |= validated
            tracking.log(metrics, step=self.global_step)
            if due:
                self.save()
            if stop.asked and not last:
                if not due:
                    self.save()
                stop.heed(self.global_step, total)
                break
        return metrics

    def validate(self, tracking: Tracking) -> dict[str, float]:
        """Score the held-out prompts; the responses go to `validation/step_<n>.jsonl`, the first to the trackers."""
        trainer = self.config.trainer
        metrics, samples = validate(self.parts, self.config)
        shown = samples[: trainer.log_val_generations]
        if shown:
            tracking.log_generations([asdict(sample) for sample in shown], step=self.global_step)
        if trainer.validation_data_dir is not None:
            self._write(samples, trainer.validation_data_dir)
        elif shown:
            self._write(shown, f"{trainer.default_local_dir}/validation")
        return metrics

    def _write(self, samples: list[Sample], folder: str) -> None:
        save_samples(samples, Path(folder) / f"step_{self.global_step}.jsonl")

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self) -> None:
        """All state of the run, whole or not at all."""
        trainer, step = self.config.trainer, self.global_step
        roles = {"actor": partial(self.actor.save_checkpoint, global_step=step)}
        if self.critic is not None:
            roles["critic"] = partial(self.critic.save_checkpoint, global_step=step)
        state = {
            "loader": self.parts.loader.state_dict(),
            "kl": self.kl.state_dict(),
            "best": self.best.state_dict(),
            "config": remembered(self.config),
            "tokenizer": str(Path(self.config.tokenizer_path()).absolute()),
        }
        keep = {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}
        wanted = {"actor": self.config.actor_rollout_ref.actor.checkpoint, "critic": self.config.critic.checkpoint}
        exports = {
            name: partial(role.export, tokenizer=self.config.tokenizer_path())
            for name, role in (("actor", self.actor), ("critic", self.critic))
            if role is not None and wanted[name].with_hf_model()
        }
        self.parts.checkpoints.save(step, roles, state, keep, exports, self.best.step)

    def _saved(self) -> Saved | None:
        trainer, checkpoints = self.config.trainer, self.parts.checkpoints
        if trainer.resume_mode == "disable":
            return None
        if trainer.resume_mode == "resume_path":
            assert trainer.resume_from_path is not None, "the config was checked"
            return checkpoints.open(trainer.resume_from_path)
        return checkpoints.latest()
