"""Trainer for PPO and related algorithms.

    status = run(config, PPOTrainer.open)        # of `loop.py`, which trains, validates and saves

`collect` and `step` are the algorithm, phase by phase. Each phase adds columns to the batch, which `columns.py` lists.
Roles compute on the ranks, and the functions of `advantages.py` compute on the driver.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from camshaft.algorithms import AdaptiveEntropy
from camshaft.checkpoint import SavedCheckpoint
from camshaft.config import PPOConfig, batch_table, render_batch_table
from camshaft.config.run_folder import number_run
from camshaft.config.schema.engine import PPOUpdateSection
from camshaft.controller import Pending, Worker, submit
from camshaft.dataproto import DataProto
from camshaft.errors import ConfigError
from camshaft.rewards.manager import PendingScores, RewardResult, log_failures
from camshaft.roles import token_columns
from camshaft.tracking import Tracking
from camshaft.tracking.durable import Ranges
from camshaft.trainer.advantages import (
    add_scores,
    build_entropy_coefficient,
    build_kl_controller,
    check_scored,
    compute_advantages,
    compute_corrections,
    compute_token_rewards,
    mean_weight,
)
from camshaft.trainer.build import PPOParts
from camshaft.trainer.dynamic_sampling import sample_informative_prompts
from camshaft.trainer.idle import IdleCheck
from camshaft.trainer.loop import TrainingLoop
from camshaft.trainer.metrics import StepMetrics, batch_metrics, mismatch, off_policy
from camshaft.trainer.mini_batches import TokenSelection, first_mini_batch, sampling_seeds, shard_rows, shuffle_seed
from camshaft.trainer.resume import input_checksums, recorded_steps
from camshaft.trainer.session import Extensions, StepHook
from camshaft.trainer.validate import Sample, best_and_worst, decode_samples, save_samples, validate

DRIVER_ONLY = (
    *("uid", "data_source", "ground_truth", "extra_info", "data_row", "sampling_seed"),
    *("prompt_id", "raw_prompt", "raw_input_ids", "rm_scores", "rm_truncated", "reward_baselines"),
    *("score_parts", "score_failure", "sum_pi_squared", "policy_versions"),
    *("env_scores", "env_failure", "stop_reason", "transcript", "answer_options", "turns"),
    "env_outcomes",
)
"""Columns that are not sent to the ranks for the updates, which do not read them."""


Responses = tuple[DataProto, PendingScores | None]
"""A batch with responses, and the reward calls that have already started."""


class PPOTrainer(TrainingLoop[PPOConfig, DataProto, Responses]):
    """Training run with PPO or a related algorithm."""

    def __init__(self, parts: PPOParts, on_step: Sequence[StepHook] = ()):
        """Set `on_step` to hooks that are called after each step, and may add metrics."""
        config, checksums = parts.config, input_checksums(parts.config, parts.reward, parts.passed_environments)
        super().__init__(config, parts.loader, parts.total_steps, parts.trained, parts.status, checksums, parts.stop)
        self.parts, self.on_step = parts, on_step
        self.validates_first, self.only_validates = config.trainer.val_before_train, config.trainer.val_only
        self.actor, self.critic, self.rewards = parts.actor, parts.critic, parts.rewards
        self.kl = build_kl_controller(config.algorithm)
        self.is_routed = config.routing_mode() is not None
        self.old_log_prob_source: Literal["actor", "update", "rollout"] = config.old_log_prob_source()
        self.actor_mini_batch, self.critic_mini_batch = config.actor_mini_batch(), config.critic_mini_batch()
        self.needs_greedy, self.needs_ref_log_prob = config.needs_greedy(), config.kl_plan().needs_log_probs
        self.part_weights = config.reward_parts()
        correction = config.algorithm.rollout_correction
        self.correction = correction if correction.is_enabled() else None
        self.entropy = build_entropy_coefficient(config.actor_rollout_ref.actor)
        self.selection = TokenSelection.of(config)
        self.needs_mean_weight = correction.needs_mean_weight()
        self.is_corrected = correction.rollout_is is not None or bool(correction.rollout_rs)
        self.idle = IdleCheck(config)
        self.examples: list[Sample] = []
        """Best and worst response of the last step, if they are shown (`trainer.sample_interval`)."""
        self._next_examples = 0.0

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: PPOConfig, extensions: Extensions | None = None) -> Iterator[Self]:
        """Build the parts of a run, and yield its trainer."""
        staleness = config.async_training.max_staleness
        if staleness and cls.collect is PPOTrainer.collect:
            raise ConfigError(
                f"{cls.__name__} generates and trains in turn, so it cannot follow async_training.max_staleness="
                f"{staleness}; open camshaft.trainer.ppo_trainer(config), or derive your class from AsyncPPOTrainer"
            )
        extensions = extensions or Extensions()
        parts = PPOParts(number_run(config), extensions.reward, extensions.environments, extensions.stop)
        with parts, cls(parts, extensions.on_step) as trainer:
            yield trainer

    def roles(self) -> Sequence[Worker]:
        return self.parts.roles()

    def introduction(self) -> Iterator[str]:
        yield from super().introduction()
        yield render_batch_table(batch_table(self.config, self.config.topology()))
        for rule, (low, high) in self.config.algorithm.rollout_correction.rejection_bounds():
            yield f"rollout_rs={rule} accepts values from {low:g} to {high:g}"

    def init_models(self) -> None:
        pending = [submit(role.init_model) for role in self.parts.roles()]
        for init in pending:
            init.result()

    # -- training step ----------------------------------------------------------------------------

    def collect(self, inputs: DataProto, metrics: StepMetrics) -> Responses:
        """Generate responses to prompts, with one weight sync. With dynamic sampling, they are already scored."""
        with self.parts.rollout_phase():
            if self.needs_greedy:
                inputs = self._add_baselines(inputs, metrics)
            if not self.config.algorithm.filter_groups.enable:
                return self._generate(inputs, metrics)
            generate, loader = self._generate_and_score, self.parts.loader
            return sample_informative_prompts(inputs, generate, loader, self.config, metrics), None

    def step(self, responses: Responses, metrics: StepMetrics) -> dict[str, float]:
        """Learn from responses: score, evaluate, compute advantages, update critic and actor."""
        config, parts, batch = self.config, self.parts, self._evaluate(*responses, metrics)
        with metrics.phase("adv"):
            rewards, penalty = compute_token_rewards(batch, config.algorithm, self.kl)
            batch = batch.union(rewards)
            metrics.add(penalty)
            if self.correction is not None:
                corrections, correction_metrics = compute_corrections(batch, self.correction)
                batch = batch.union(corrections)
                metrics.add(correction_metrics)
            batch = batch.union(compute_advantages(batch, config.algorithm, parts.estimator, self.part_weights))
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
                actor_rows = inputs.reorder(rows)
                if self.selection is not None:
                    selected = self.selection.columns(batch, rows, self.actor_mini_batch, parts.actor_dp_size)
                    actor_rows = actor_rows.with_columns(**selected)
                extra: dict[str, Any] = {} if self.entropy is None else {"entropy_coeff": self.entropy.value}
                pending = submit(self.actor.update_actor, actor_rows, presharded=True, old_log_probs=source, **extra)
                update = pending.result()
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
            metrics.add(self.compare(compared))
        if self.entropy is not None and self._updates_actor():
            self._adapt(self.entropy, metrics)
        self.batch = batch
        return metrics.finished(batch)

    def compare(self, batch: DataProto) -> dict[str, float]:
        """Compare the log-probs of the rollout with those of the trainer before the update, on rows that have both."""
        return mismatch(batch) | (off_policy(batch) if self.is_corrected else {})

    def _evaluate(self, batch: DataProto, scoring: PendingScores | None, metrics: StepMetrics) -> DataProto:
        """Add scores, reference log-probs, values and, unless the update computes them, old log-probs.

        The phases overlap: roles on separate devices compute at the same time, while reward functions run in their
        worker processes. The time of a phase is the time that the driver waits for its result.
        """
        sequences = batch.select(*token_columns(batch))
        routed = sequences.union(batch.select("routed_experts")) if self.is_routed else sequences
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
        if self.needs_mean_weight:
            batch = self._add_mean_weight(batch, routed, metrics)
        if self.config.trainer.rollout_data_dir is not None:
            scores = batch.ragged("token_level_scores").sum()
            self._write(decode_samples(self.parts, batch, scores), self.config.trainer.rollout_data_dir)
        return batch

    def _add_mean_weight(self, batch: DataProto, sequences: DataProto, metrics: StepMetrics) -> DataProto:
        """Add the column `rollout_is_mean`, the mean importance weight of the policy before the update."""
        with metrics.phase("old_log_prob"):
            train = self.actor.compute_log_prob(sequences).ragged("old_log_probs")
        mean = mean_weight(batch, train, self.config.algorithm.rollout_correction)
        return batch.with_columns(rollout_is_mean=mean)

    def _generate(self, prompts: DataProto, metrics: StepMetrics, first_row: int = 0) -> Responses:
        """Generate `rollout.n` responses to each prompt. Return the batch and the reward calls that have started.

        `first_row` is the number of rows that were generated earlier in this step.
        """
        self._sync(metrics)
        with metrics.phase("gen"):
            batch = self.rows_to_generate(prompts, self.global_step, first_row)
            generated, scoring = self.parts.start_generation(batch).result()
            return metrics.union(batch.drop(*self.parts.replaced), generated), scoring

    def rows_to_generate(self, prompts: DataProto, step: int, first_row: int = 0) -> DataProto:
        """Return `rollout.n` rows for each prompt, with the seeds of a step from row `first_row` on."""
        rows = prompts.repeat(self.config.actor_rollout_ref.rollout.n)
        seeds = sampling_seeds(self.config.trainer.seed, step, len(rows), first_row)
        return rows.with_columns(sampling_seed=seeds)

    def _sync(self, metrics: StepMetrics) -> None:
        """Send the weights to the rollout, unless it is awake since an earlier generation of the step."""
        if self.parts.is_rollout_awake:
            return
        with metrics.phase("sync"):
            measured = self.parts.sync_weights(self.global_step - 1)
        measured.pop("timing_s/sync", None)  # of the slowest rank; the phase has the time that the step waits
        metrics.add(measured)

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
        self._sync(metrics)
        with metrics.phase("gen_max"):
            n = self.config.actor_rollout_ref.rollout.n  # environments have the seeds of the sampled responses
            seeds = sampling_seeds(self.config.trainer.seed, self.global_step, len(prompts) * n)[::n]
            seeded = prompts.with_columns(sampling_seed=seeds)
            generated, scoring = self.parts.start_generation(seeded, greedy=True).result()
        with metrics.phase("reward_max"):
            greedy = self.parts.add_model_scores(prompts.with_columns(**generated.columns))
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

    def _adapt(self, entropy: AdaptiveEntropy, metrics: StepMetrics) -> None:
        """Adapt the coefficient of the entropy bonus after an update."""
        metrics.add({"actor/entropy_coeff": entropy.value})
        entropy.update(metrics.values.get("actor/entropy", math.nan))

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

    # -- after the step ---------------------------------------------------------------------------

    def after_step(self, metrics: dict[str, float]) -> None:
        """Report a step in which nothing is trained, write its responses, and select those that are shown."""
        metrics |= self.idle.check(self.global_step, self.batch, metrics)
        self.is_over = self.idle.is_over
        self.examples = best_and_worst(self.parts, self.batch) if self._shows_examples() else []
        if self.config.trainer.samples.enable:
            self.status.enter("samples")
            self.files.add(self.parts.samples.write(self.batch, self.global_step))

    def log_samples(self, tracking: Tracking) -> None:
        if self.examples:
            tracking.log_samples([asdict(example) for example in self.examples], step=self.global_step)

    def finish(self) -> None:
        """Raise IdleError if the run has ended because nothing was trained, unless its prompts are solved."""
        self.idle.finish(self.global_step)

    def validate(self, tracking: Tracking) -> dict[str, float]:
        """Score and write responses to the validation prompts, and log the first `log_val_generations` of them."""
        trainer = self.config.trainer
        with self.parts.rollout_phase():
            metrics, samples = validate(self.parts, self.config, self.global_step)
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
        self.files.add(path)

    # -- checkpoints ------------------------------------------------------------------------------

    def checkpoint_to_resume(self) -> SavedCheckpoint | None:
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            assert trainer.resume_from_path is not None, "validated by the config"
            return self.checkpoints.open(trainer.resume_from_path)
        return super().checkpoint_to_resume()

    def prepare(self) -> SavedCheckpoint | None:
        saved = super().prepare()
        if not self.only_validates:
            recorded = recorded_steps(saved, self.parts.folder)
            self.parts.samples.start(None if saved is None else saved.step, recorded["samples"])
        return saved

    def state(self) -> dict[str, Any]:
        tokenizer = str(Path(self.parts.tokenizer.name_or_path).absolute())
        entropy = {} if self.entropy is None else self.entropy.state_dict()
        return {
            "kl": self.kl.state_dict(), "entropy": entropy, "idle": self.idle.state_dict(), "tokenizer": tokenizer
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])
        if self.entropy is not None:
            self.entropy.load_state_dict(state.get("entropy", {}))
        self.idle.load_state_dict(state.get("idle", {}))

    def recorded(self) -> dict[str, Ranges]:
        return super().recorded() | {"samples": self.parts.samples.stored_steps()}

    def keep(self) -> dict[str, int | None]:
        trainer = self.config.trainer
        return {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}

    def exports(self) -> dict[str, Callable[[str, str | None], None]]:
        contents = {"actor": self.config.actor_rollout_ref.actor.checkpoint, "critic": self.config.critic.checkpoint}
        return {
            name: partial(role.export, tokenizer=self.parts.exported_tokenizer)
            for name, role in self.trained.items()
            if contents[name].saves_hf_model()
        }
