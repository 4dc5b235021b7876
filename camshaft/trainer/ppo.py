"""Trainer for PPO and related algorithms: the training step and the training loop.

    with PPOParts(config) as parts, Tracking(...) as tracking:
        trainer = PPOTrainer(parts.config, parts)
        trainer.prepare()
        trainer.fit(tracking)

    status = run_ppo(config)        # also sets up session and trackers

`step` is the algorithm, phase by phase. Each phase adds columns to the batch, which `columns.py` lists. Roles compute
on the ranks, and the functions of `advantages.py` compute on the driver.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from camshaft.checkpoint import BestStep, SavedCheckpoint
from camshaft.config import PPOConfig, batch_table, render_batch_table
from camshaft.config.schema.engine import PPOUpdateSection
from camshaft.controller import Pending, submit
from camshaft.controller.placement import pool_specs
from camshaft.dataproto import DataProto
from camshaft.errors import CamshaftError, ScoringAbandoned
from camshaft.garbage import frozen_objects
from camshaft.rewards.manager import PendingScores, RewardResult, log_failures
from camshaft.stop import Stop
from camshaft.tracking import Tracking
from camshaft.trainer.advantages import (
    add_scores,
    build_kl_controller,
    check_scored,
    compute_advantages,
    compute_corrections,
    compute_token_rewards,
)
from camshaft.trainer.build import PPOParts
from camshaft.trainer.divergence import DivergenceCheck
from camshaft.trainer.dynamic_sampling import sample_informative_prompts
from camshaft.trainer.idle import IdleCheck
from camshaft.trainer.metrics import StepMetrics, batch_metrics, mismatch
from camshaft.trainer.mini_batches import first_mini_batch, sampling_seeds, shard_rows, shuffle_seed
from camshaft.trainer.resume import check_resume, config_record, input_checksums, log_resume, recorded_steps
from camshaft.trainer.schedule import SAVE_INTERVAL, Schedule
from camshaft.trainer.session import Extensions, StepHook, call_hooks, check_libraries, session
from camshaft.trainer.validate import Sample, best_and_worst, decode_samples, save_samples, validate

logger = logging.getLogger(__name__)

SEQUENCES = ("prompts", "responses", "response_mask")
"""Columns that roles read for a forward pass over the batch."""

DRIVER_ONLY = (
    *("uid", "data_source", "ground_truth", "extra_info", "data_row", "sampling_seed"),
    *("prompt_id", "raw_prompt", "raw_input_ids", "rm_scores", "rm_truncated", "reward_baselines"),
    *("score_parts", "score_failure"),
)
"""Columns that are not sent to the ranks for the updates, which do not read them."""


class PPOTrainer:
    """Training run with PPO or a related algorithm."""

    def __init__(self, config: PPOConfig, parts: PPOParts, on_step: Sequence[StepHook] = ()):
        """Set `on_step` to hooks that are called after each step, and may add metrics."""
        assert config.data == parts.config.data, "pass parts.config, whose batch size fits the data"
        self.config, self.parts, self.on_step = config, parts, on_step
        self.actor, self.critic, self.rewards = parts.actor, parts.critic, parts.rewards
        self.kl = build_kl_controller(config.algorithm)
        self.is_routed = config.routing_mode() is not None
        self.old_log_prob_source: Literal["actor", "update", "rollout"] = config.old_log_prob_source()
        self.actor_mini_batch, self.critic_mini_batch = config.actor_mini_batch(), config.critic_mini_batch()
        self.needs_greedy, self.needs_ref_log_prob = config.needs_greedy(), config.needs_ref_log_prob()
        correction = config.algorithm.rollout_correction
        self.correction = correction if correction.is_enabled() else None
        self.best = BestStep(config.trainer.best_metric, config.trainer.best_metric_mode)
        self.divergence = DivergenceCheck(parts.trained, config.trainer.max_skipped_steps)
        self.idle = IdleCheck(config)
        self.input_checksums = input_checksums(config, parts.reward)
        self.global_step = 0
        self._batch = DataProto()
        """Batch of the step that `fit` is about to log."""
        self.examples: list[Sample] = []
        """Best and worst response of the last step, if they are shown (`trainer.sample_interval`)."""
        self._next_examples = 0.0

    # -- training step ----------------------------------------------------------------------------

    def step(self, prompts: DataProto) -> dict[str, float]:
        """Run one training step: generate, score, evaluate, compute advantages, update critic and actor."""
        config, parts, metrics = self.config, self.parts, StepMetrics(self.parts.status)
        if self.needs_greedy:
            prompts = self._add_baselines(prompts, metrics)
        scoring: PendingScores | None = None
        if config.algorithm.filter_groups.enable:
            batch = sample_informative_prompts(prompts, self._generate_and_score, parts.loader, config, metrics)
        else:
            batch, scoring = self._generate(prompts, metrics)
        batch = self._evaluate(batch, scoring, metrics)
        with metrics.phase("adv"):
            rewards, penalty = compute_token_rewards(batch, config.algorithm, self.kl)
            batch = batch.union(rewards)
            batch = batch.union(compute_advantages(batch, config.algorithm, parts.estimator))
            metrics.add(penalty)
            if self.correction is not None:
                corrections, correction_metrics = compute_corrections(batch, self.correction)
                batch = batch.union(corrections)
                metrics.add(correction_metrics)
        # If critic and actor run on separate devices, their updates overlap.
        inputs, critic_update = batch.drop(*DRIVER_ONLY), None
        if self.critic is not None:
            with metrics.phase("update_critic"):
                rows = self._update_rows(len(inputs), config.critic, self.critic_mini_batch, parts.critic_dp_size)
                critic_rows = inputs.drop("routed_experts").reorder(rows)
                critic_update = submit(self.critic.update_critic, critic_rows, presharded=True)
        source = self._old_log_prob_source()
        compared = batch if source == "actor" else None  # rows with log-probs of the trainer, before any update
        if self._updates_actor():
            with metrics.phase("update_actor"):
                section = config.actor_rollout_ref.actor
                rows = self._update_rows(len(inputs), section, self.actor_mini_batch, parts.actor_dp_size)
                update = submit(
                    self.actor.update_actor, inputs.reorder(rows), presharded=True, old_log_probs=source
                ).result()
                metrics.add(update.meta_info["metrics"])
                if source == "update":
                    batch = compared = batch.union(DataProto(update.columns).reorder(rows.argsort()))
                elif source == "rollout":
                    first = first_mini_batch(rows, self.actor_mini_batch, parts.actor_dp_size)
                    compared = batch.reorder(first).with_columns(**update.columns)
        if critic_update is not None:
            with metrics.phase("update_critic"):
                metrics.add(critic_update.result().meta_info["metrics"])
        metrics.add(batch_metrics(batch))
        if compared is not None:
            metrics.add(mismatch(compared))
        self._batch = batch
        values = metrics.finished(batch)
        return call_hooks(self.on_step, self.global_step, batch, values) if self.on_step else values

    def _evaluate(self, batch: DataProto, scoring: PendingScores | None, metrics: StepMetrics) -> DataProto:
        """Add scores, reference log-probs, values and, unless the update computes them, old log-probs.

        The phases overlap: roles on separate devices compute at the same time, while reward functions run in their
        worker processes. The time of a phase is the time that the driver waits for its result.
        """
        sequences = batch.select(*SEQUENCES)
        routed = batch.select(*SEQUENCES, "routed_experts") if self.is_routed else sequences
        pending: dict[str, Pending[DataProto]] = {}
        if self._old_log_prob_source() == "rollout":
            batch = batch.with_columns(old_log_probs=batch["rollout_log_probs"])
        elif self._old_log_prob_source() == "actor":
            with metrics.phase("old_log_prob"):
                pending["old_log_prob"] = submit(self.actor.compute_log_prob, routed)
        if self.needs_ref_log_prob:
            with metrics.phase("ref"):
                pending["ref"] = submit(self.actor.compute_ref_log_prob, sequences)
        if self.critic is not None:
            with metrics.phase("values"):
                pending["values"] = submit(self.critic.compute_values, sequences)
        if "token_level_scores" not in batch:
            batch, _ = self._score(batch, scoring, metrics)
        for phase, evaluation in pending.items():
            with metrics.phase(phase):
                batch = metrics.union(batch, evaluation.result())
        if self.config.trainer.rollout_data_dir is not None:
            scores = batch.ragged("token_level_scores").sum()
            self._write(decode_samples(self.parts, batch, scores), self.config.trainer.rollout_data_dir)
        return batch

    def _generate(
        self, prompts: DataProto, metrics: StepMetrics, first_row: int = 0
    ) -> tuple[DataProto, PendingScores | None]:
        """Generate `rollout.n` responses to each prompt. Return the batch and the reward calls that have started.

        `first_row` is the number of rows that were generated earlier in this step.
        """
        with metrics.phase("gen"):
            rows = prompts.repeat(self.config.actor_rollout_ref.rollout.n)
            seeds = sampling_seeds(self.config.trainer.seed, self.global_step, len(rows), first_row)
            batch = rows.with_columns(sampling_seed=seeds)
            generated, scoring = self.parts.generate(batch)
            return metrics.union(batch, generated), scoring

    def _score(
        self, batch: DataProto, scoring: PendingScores | None, metrics: StepMetrics
    ) -> tuple[DataProto, RewardResult]:
        """Score the responses, and return the batch with scores and the result of the reward functions."""
        with metrics.phase("reward"):
            batch = self.parts.add_model_scores(batch)
            result = self.rewards.score(batch, self.parts.decode, scoring)
            log_failures(result.failures, self.parts.folder, f"step {self.global_step}")
            check_scored(result, len(batch), "responses")
            metrics.add(result.metrics)
        return add_scores(batch, result), result

    def _generate_and_score(
        self, prompts: DataProto, metrics: StepMetrics, first_row: int
    ) -> tuple[DataProto, RewardResult]:
        """Generate and score responses for dynamic sampling, which selects prompts by their scores."""
        return self._score(*self._generate(prompts, metrics, first_row), metrics)

    def _add_baselines(self, prompts: DataProto, metrics: StepMetrics) -> DataProto:
        """Add the column `reward_baselines`, the score of the greedy response to each prompt (ReMax, arXiv:2310.10505).

        Greedy responses are scored like sampled ones, without a KL penalty. Their reward metrics are named
        `baseline/...`. If a greedy response is dropped because its scoring failed, the baseline is NaN, and
        `add_scores` drops the samples of the prompt.
        """
        with metrics.phase("gen_max"):
            generated, scoring = self.parts.generate(prompts, greedy=True)
        with metrics.phase("reward_max"):
            greedy = self.parts.add_model_scores(prompts.union(DataProto(generated.columns)))
            result = self.rewards.score(greedy, self.parts.decode, scoring)
        log_failures(result.failures, self.parts.folder, f"step {self.global_step}, greedy responses")
        check_scored(result, len(greedy), "greedy responses")
        baselines = torch.where(result.keep_mask, result.token_level_scores.sum(), torch.nan)
        baseline_metrics = {name.replace("reward/", "baseline/", 1): value for name, value in result.metrics.items()}
        metrics.add(baseline_metrics | {"baseline/score/mean": float(baselines.nanmean())})
        return prompts.with_columns(reward_baselines=baselines)

    def _shows_examples(self) -> bool:
        """Return True in the first step, and then at most once per `trainer.sample_interval` seconds."""
        interval, now = self.config.trainer.sample_interval, time.monotonic()
        if interval is None or now < self._next_examples:
            return False
        self._next_examples = now + interval
        return True

    def _updates_actor(self) -> bool:
        return self.global_step > self.config.trainer.critic_warmup

    def _old_log_prob_source(self) -> Literal["actor", "update", "rollout"]:
        """Return the source of the old log-probs in this step. Without an actor update, the actor computes them."""
        if self.old_log_prob_source == "update" and not self._updates_actor():
            return "actor"
        return self.old_log_prob_source

    def _update_rows(self, count: int, section: PPOUpdateSection, mini_batch: int, dp_size: int) -> Tensor:
        """Return the row order for the `presharded` update of a role."""
        seed = shuffle_seed(self.config.trainer.seed, self.global_step) if section.shuffle else None
        return shard_rows(count, mini_batch, section.ppo_epochs, seed, dp_size)

    # -- training loop ---------------------------------------------------------------------------------

    def prepare(self) -> SavedCheckpoint | None:
        """Build the models. If the run resumes from a checkpoint, load and return it."""
        self.parts.status.enter("load")
        saved = self._checkpoint_to_resume()
        if saved is not None:
            check_resume(saved, self.config, self.parts.trained, self.input_checksums)
        pending = [submit(role.init_model) for role in self.parts.roles()]
        for init in pending:
            init.result()
        if saved is not None:
            for name, role in self.parts.trained.items():
                role.load_checkpoint(saved.role(name))
            self.parts.loader.load_state_dict(saved.state["loader"])
            self.kl.load_state_dict(saved.state["kl"])
            self.best.load_state_dict(saved.state["best"])
            self.idle.load_state_dict(saved.state.get("idle", {}))
            self.global_step = saved.step
            if not self.config.trainer.val_only:
                log_resume(saved, self.parts.total_steps)
        if self.config.trainer.resume_mode != "auto" and not self.config.trainer.val_only:
            self.parts.checkpoints.move_aside(after=self.global_step)
        if not self.config.trainer.val_only:
            recorded = recorded_steps(saved, self.parts.folder)
            self.parts.samples.start(None if saved is None else saved.step, recorded["samples"])
        return saved

    def fit(self, tracking: Tracking, stop: Stop | None = None) -> dict[str, float]:
        """Train until the last step or a stop signal, or only validate (`val_only`). Return the last metrics.

        If the scoring of a step does not end in time after a stop signal, the step is abandoned.
        """
        trainer, total, stop = self.config.trainer, self.parts.total_steps, stop or Stop()
        saves, tests = Schedule(trainer.save_freq, SAVE_INTERVAL), Schedule(trainer.test_freq)
        metrics: dict[str, float] = {}
        if trainer.val_only or (trainer.val_before_train and self.global_step == 0):
            metrics, is_validated = self._validate_first(tracking, tests)
            if not is_validated:
                stop.acknowledge(self.global_step, total)
            if trainer.val_only or not is_validated:
                return metrics
        saved_step, is_good, should_save = self.global_step, True, False
        loader_state = self.parts.loader.state_dict()
        for prompts in self.parts.loader:
            if self.global_step >= total or self.idle.is_over:
                break
            self.global_step += 1
            self.parts.status.step = self.global_step
            try:
                metrics = self.step(prompts)
            except ScoringAbandoned as error:
                logger.warning("abandoned step %d: %s", self.global_step, error)
                self.global_step -= 1
                self.parts.loader.load_state_dict(loader_state)
                if self.global_step > saved_step:
                    self.save(prune=is_good)
                stop.acknowledge(self.global_step, total)
                break
            metrics |= self.idle.check(self.global_step, self._batch, metrics)
            self.save_samples()
            is_last = self.global_step == total or self.parts.loader.exhausted or self.idle.is_over
            should_save = should_save or self.idle.is_over or saves.is_due(self.global_step, is_last)
            is_validated = True
            if tests.is_due(self.global_step, is_last):
                val_metrics = self._validate_step(tracking, tests, metrics)
                is_validated = val_metrics is not None
                if val_metrics is not None:
                    should_save = self.best.update(val_metrics, self.global_step) or should_save
                    metrics |= val_metrics
            if self.examples:
                tracking.log_samples([asdict(example) for example in self.examples], step=self.global_step)
            tracking.log(metrics, step=self.global_step)
            is_good = self.divergence.check_updates(self.global_step, metrics)
            is_stopped = stop.requested is not None and not (is_last and is_validated)
            if is_stopped or (should_save and (is_good or is_last)):
                with saves.measure():
                    self.save(prune=is_good)
                saved_step, should_save = self.global_step, False
            elif should_save:
                self.divergence.check_outputs(self.global_step)
            if is_stopped:
                stop.acknowledge(self.global_step, total)
                break
            loader_state = self.parts.loader.state_dict()
        if not stop.status:
            self.idle.finish(self.global_step)
        return metrics

    def _validate_first(self, tracking: Tracking, tests: Schedule) -> tuple[dict[str, float], bool]:
        """Validate before the first step. Return the metrics, and False if a stop signal ended the validation."""
        try:
            with tests.measure():
                metrics = self.validate(tracking)
        except ScoringAbandoned as error:
            logger.warning("abandoned the validation before step %d: %s", self.global_step + 1, error)
            return {}, False
        tracking.log(metrics, step=self.global_step)
        if not self.config.trainer.val_only:
            self.best.update(metrics, step=0)
        return metrics, True

    def _validate_step(self, tracking: Tracking, tests: Schedule, metrics: dict[str, float]) -> dict[str, float] | None:
        """Validate after a step. Return the metrics, or None if a stop signal ended the validation.

        If the validation fails, log `metrics`, those of the step, first.
        """
        try:
            with tests.measure():
                self.divergence.check_outputs(self.global_step)
                return self.validate(tracking)
        except ScoringAbandoned as error:
            logger.warning("abandoned the validation after step %d: %s", self.global_step, error)
            return None
        except CamshaftError:
            tracking.log(metrics, step=self.global_step)
            raise

    def save_samples(self) -> None:
        """Write the responses of the step, select those that are shown, and release the batch."""
        batch, self._batch = self._batch, DataProto()
        self.examples = best_and_worst(self.parts, batch) if self._shows_examples() else []
        if self.config.trainer.samples.enable:
            self.parts.status.enter("samples")
            self.parts.files.add(self.parts.samples.write(batch, self.global_step))

    def validate(self, tracking: Tracking) -> dict[str, float]:
        """Score and write responses to the validation prompts, and log the first `log_val_generations` of them."""
        trainer = self.config.trainer
        self.parts.status.enter("validate")
        metrics, samples = validate(self.parts, self.config)
        logged_samples = samples[: trainer.log_val_generations]
        if logged_samples:
            tracking.log_generations([asdict(sample) for sample in logged_samples], step=self.global_step)
        if trainer.validation_data_dir is not None:
            self._write(samples, trainer.validation_data_dir)
        elif logged_samples:
            self._write(logged_samples, f"{trainer.default_local_dir}/validation")
        return metrics

    def _write(self, samples: list[Sample], folder: str) -> None:
        path = Path(folder).expanduser() / f"step_{self.global_step}.jsonl"
        save_samples(samples, path)
        self.parts.files.add(path)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, prune: bool = True) -> None:
        """Save the state of the run as an atomic checkpoint, unless a model has diverged, and prune old checkpoints.

        The files of the steps up to this one are flushed to the disk before.
        """
        trainer, step = self.config.trainer, self.global_step
        self.parts.status.enter("save")
        self.divergence.check_outputs(step)
        trained = self.parts.trained
        roles = {name: partial(role.save_checkpoint, global_step=step) for name, role in trained.items()}
        state = {
            "loader": self.parts.loader.state_dict(),
            "kl": self.kl.state_dict(),
            "best": self.best.state_dict(),
            "idle": self.idle.state_dict(),
            "config": config_record(self.config),
            "inputs": self.input_checksums,
            "tokenizer": str(Path(self.parts.tokenizer.name_or_path).absolute()),
            "recorded": {"metrics": self.parts.files.flush(), "samples": self.parts.samples.stored_steps()},
        }
        keep = {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep} if prune else {}
        contents = {"actor": self.config.actor_rollout_ref.actor.checkpoint, "critic": self.config.critic.checkpoint}
        exports = {
            name: partial(role.export, tokenizer=self.config.tokenizer_path())
            for name, role in trained.items()
            if contents[name].saves_hf_model()
        }
        self.parts.checkpoints.save(step, roles, state, keep, exports, self.best.step)

    def _checkpoint_to_resume(self) -> SavedCheckpoint | None:
        trainer, checkpoints = self.config.trainer, self.parts.checkpoints
        if trainer.resume_mode == "disable":
            return None
        if trainer.resume_mode == "resume_path":
            assert trainer.resume_from_path is not None, "validated by the config"
            return checkpoints.open(trainer.resume_from_path)
        return checkpoints.latest()


def run_ppo(config: PPOConfig, extensions: Extensions | None = None) -> int:
    """Train with one config, and return the exit status."""
    extensions = extensions or Extensions()
    check_libraries(config)
    ranks = sum(spec.world_size for spec in pool_specs(config))
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(session(config.trainer, ranks, extensions.from_python))
        run.say_choices(config)
        parts = stack.enter_context(PPOParts(config, extensions.reward))
        config = parts.config
        run.say(render_batch_table(batch_table(config, config.topology())))
        for rule, (low, high) in config.algorithm.rollout_correction.rejection_bounds():
            run.say(f"rollout_rs={rule} accepts values from {low:g} to {high:g}")
        trainer = PPOTrainer(config, parts, extensions.on_step)
        saved = trainer.prepare()
        only_validate = config.trainer.val_only
        resumed, subfolder = (None, "validation") if only_validate else (saved, "")
        with run.tracking(config, parts.total_steps, resumed, subfolder) as tracking, frozen_objects():
            stop = run.listen(parts.stop, extensions.from_python)
            trainer.fit(tracking, stop)
            parts.finish_saving()  # write all checkpoints before the trackers report the run as finished
            if stop.status:
                tracking.ending = "stopped"
        if stop.status:
            run.say_how_to_resume()
        elif not only_validate:
            run.say_results(parts.total_steps, parts.loader.steps_per_epoch)
    return stop.status
