"""Training on stale batches: versions, equality with a synchronous emulation, and delays that change nothing."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import delays
from support.delays import DELAYED
from support.ppo_runs import Step, ppo_config, run_ppo
from support.same_run import ACTOR, RANKS

from camshaft.dataproto import DataProto
from camshaft.errors import ConfigError, WorkerError
from camshaft.tracking import RunInfo, Tracking
from camshaft.trainer import ppo_trainer
from camshaft.trainer.metrics import StepMetrics
from camshaft.trainer.ppo import PPOTrainer, Responses

ROLLOUT, STALENESS = "actor_rollout_ref.rollout", "async_training.max_staleness"
CORRECTION = "algorithm.rollout_correction"
GRPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    f"{ROLLOUT}.n": 2,
    f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{CORRECTION}.bypass_mode": True,
}
PPO: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    f"{ACTOR}.ppo_epochs": 2,
    f"{CORRECTION}.rollout_is": "token",
    "trainer.test_freq": 2,
}
MEASURED = ("timing_s/", "timing/", "perf/", "async/")
OF_SYNC = {"rollout/sync_bytes", "rollout/weights_version"}


def emulation(max_staleness: int) -> type[PPOTrainer]:
    """Return a trainer without pools and ledger, which generates the batches of a pipeline in turn.

    Before it learns batch b, it generates those whose formula max(0, c - 1 - k) is the current version b - 1.
    """

    class Emulation(PPOTrainer):
        waiting: dict[int, DataProto]

        def collect(self, inputs: DataProto, metrics: StepMetrics) -> Responses:
            step, total = self.global_step, self.total_steps
            if step == 1:
                self.waiting = {}
            for batch in range(step, total + 1):
                if max(0, batch - 1 - max_staleness) == step - 1:
                    prompts = inputs if batch == 1 else self.parts.loader.next_batch()
                    inner = StepMetrics(self.status)
                    with self.parts.rollout_phase():
                        self.parts.sync_weights(step - 1)
                        rows = self.rows_to_generate(prompts, batch)
                        generated, _ = self.parts.start_generation(rows).result()
                    self.waiting[batch] = inner.union(rows, generated).with_meta(metrics=inner.values)
            metrics.add(self.waiting[step].meta_info["metrics"])
            return self.waiting.pop(step), None

    class Numbers:
        """Source without prompts, after the first batch."""

        def __init__(self, trainer: PPOTrainer):
            self.loader = trainer.parts.loader
            self.steps_per_epoch, self.exhausted = self.loader.steps_per_epoch, False

        def __iter__(self) -> Iterator[DataProto]:
            yield self.loader.next_batch()
            while True:
                yield DataProto()

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Opened(Emulation):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.source = Numbers(self)  # pyright: ignore

    return Opened


def assert_equal(expected: list[Step], actual: list[Step], but: tuple[str, ...] = MEASURED) -> None:
    for number, (one, other) in enumerate(zip(expected, actual, strict=True), start=1):
        names = {name for name in one.metrics.keys() | other.metrics.keys() if not name.startswith(but)} - OF_SYNC
        for name in names:
            values = one.metrics[name], other.metrics[name]
            assert values[0] == values[1] or all(map(math.isnan, values)), f"step {number}: {name}: {values}"
        for weights, reference in ((other.actor, one.actor), (other.critic, one.critic)):
            assert weights.keys() == reference.keys()
            assert all(torch.equal(weights[name], reference[name]) for name in reference), f"step {number}"


def versions(step: Step) -> set[int]:
    return set(step.batch["policy_versions"].values.tolist())


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "grpo": (GRPO, 1),
    "ppo": ({**PPO, f"{ROLLOUT}.name": "process"}, 2),
    "ranks": ({**GRPO, **RANKS}, 2),
    "rejection": (
        {
            **GRPO,
            f"{CORRECTION}.bypass_mode": False,
            f"{CORRECTION}.rollout_rs": "token_k1",
            f"{CORRECTION}.rollout_rs_threshold": "1.1",
        },
        1,
    ),
    "adapter": ({**GRPO, "actor_rollout_ref.model.lora_rank": 4, f"{ACTOR}.use_kl_loss": True}, 1),
    "long": (GRPO, 4),
}
SLOW = ("ranks", "rejection", "adapter", "long")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES])
def test_a_pipeline_equals_its_synchronous_emulation(case: str, tmp_path: Path) -> None:
    overrides, staleness = CASES[case]
    steps = staleness + 3
    pool = {"+trainer.resource_pools.rollout.n_gpus_per_node": 2} if "ranks" in case else {}
    expected = run_ppo(tmp_path, overrides, steps, emulation(staleness))
    actual = run_ppo(tmp_path, {**overrides, **pool, STALENESS: staleness}, steps)
    assert_equal(expected, actual)
    if "trainer.test_freq" not in overrides:  # the recorder keeps the rows that were scored last
        assert [versions(step) for step in actual] == [{max(0, b - 1 - staleness)} for b in range(1, steps + 1)]
    ages = [min(b - 1, staleness) for b in range(1, steps + 1)]
    for step, age in zip(actual, ages, strict=True):
        assert step.metrics["async/staleness_mean"] == step.metrics["async/staleness_max"] == age
        assert step.metrics[f"async/age_{age}_share"] == 1.0
        assert step.metrics["rollout/log_prob_diff_max"] < 1e-5 or age > 0
    probes = [step.metrics.get("async/probe_version") for step in actual]
    if "process" not in overrides.get(f"{ROLLOUT}.name", ""):  # which does not score
        late = staleness + 1  # step b reports the probe of version b - 2 - k
        assert probes == [None] * late + [float(version) for version in range(steps - late)]
        assert max(step.metrics["async/probe_log_prob_diff_mean"] for step in actual[late:]) < 1e-5
    assert max(step.metrics["rollout/log_prob_diff_max"] for step in actual) > 1e-3  # the batches were stale
    assert actual[-1].metrics["async/batches_in_flight"] == 0


def test_the_estimated_policy_is_that_of_the_rollout_at_age_0(tmp_path: Path) -> None:
    estimated = {f"{CORRECTION}.loss_type": "interpolated", f"{CORRECTION}.rollout_is": "token"}
    bypass = run_ppo(tmp_path, {**GRPO, STALENESS: 2}, steps=3)
    steps = run_ppo(tmp_path, {**GRPO, **estimated, STALENESS: 2}, steps=3)
    weights = [step.metrics.pop("actor/rollout_is_mean") for step in steps]
    assert_equal(bypass[:1], steps[:1], (*MEASURED, "rollout_corr/"))
    assert weights[0] == 1.0
    for step, weight in zip(steps[1:], weights[1:], strict=True):  # of ages 1 and 2: alpha is 1/2 and 2/3
        assert 1e-5 < abs(weight - 1) < 0.1
        age = int(step.metrics["async/staleness_max"])
        assert set(step.batch["policy_ages"].values.tolist()) == {age}
    assert not all(torch.equal(steps[2].actor[name], bypass[2].actor[name]) for name in steps[2].actor)


def test_a_probe_shows_a_generator_that_differs(tmp_path: Path) -> None:
    wrong = run_ppo(tmp_path, {**GRPO, STALENESS: 1, f"{ROLLOUT}.name": f"{delays.__name__}:Inaccurate"}, steps=4)
    gaps = [step.metrics["async/probe_log_prob_diff_mean"] for step in wrong[2:]]
    assert min(gaps) > 1e-3
    right = run_ppo(tmp_path, {**GRPO, STALENESS: 1}, steps=4)[-1].metrics
    assert right["async/probe_log_prob_diff_mean"] < 1e-5 < right["rollout/log_prob_diff_mean"]


PROBED = "async/probe_log_prob_diff_mean"


def test_a_probe_leaves_out_tokens_that_the_rollout_cannot_score(tmp_path: Path) -> None:
    limited = {f"{ROLLOUT}.name": f"{delays.__name__}:Limited"}
    longest = {"data.max_prompt_length": 9, "data.truncation": "left", f"{ROLLOUT}.ignore_eos": True}
    steps = run_ppo(tmp_path, {**GRPO, **limited, **longest, STALENESS: 1}, steps=3)
    for step in steps:
        assert set((step.batch["prompts"].lengths + step.batch["responses"].lengths).tolist()) == {9 + 8}
    assert 0 < steps[-1].metrics[PROBED] < 1e-5


@pytest.mark.parametrize(("rollout", "temperature"), [("Limited", 0.8), ("Limited", 1.0), ("process", 0.8)])
def test_only_a_rollout_that_scores_its_samples_has_probes(rollout: str, temperature: float, tmp_path: Path) -> None:
    name = f"{delays.__name__}:{rollout}" if rollout == "Limited" else rollout
    settings = {**GRPO, STALENESS: 1, f"{ROLLOUT}.name": name, f"{ROLLOUT}.temperature": temperature}
    metrics = run_ppo(tmp_path, settings, steps=3)[-1].metrics
    has_none = rollout == "Limited" and temperature != 1
    assert (PROBED not in metrics) if has_none else metrics[PROBED] < 1e-5


@pytest.mark.parametrize("loss_type", ["", "ppo_clip", "interpolated"])
def test_learned_lengths_are_those_of_accepted_rows(loss_type: str, tmp_path: Path) -> None:
    bypass = bool(loss_type)
    keys = {**GRPO, f"{CORRECTION}.rollout_rs": "seq_mean_k3", f"{CORRECTION}.bypass_mode": bypass, STALENESS: 1}
    if loss_type == "interpolated":
        keys |= {f"{CORRECTION}.loss_type": loss_type, f"{CORRECTION}.rollout_is": "token"}
    free = run_ppo(tmp_path, {**keys, f"{CORRECTION}.rollout_rs_threshold": "10.0"}, steps=2)[1]
    mean = free.metrics["rollout/kl_k3"]  # over the tokens, which some rows exceed
    limit = str(mean / 4 if loss_type == "interpolated" else mean)  # half of the difference has a quarter of the k3
    step = run_ppo(tmp_path, {**keys, f"{CORRECTION}.rollout_rs_threshold": limit}, steps=2)[1]
    assert free.metrics["async/learned_length/mean"] == free.metrics["async/generated_length/mean"]
    lengths = step.batch.ragged("responses").lengths
    assert step.metrics["async/generated_length/mean"] == pytest.approx(float(lengths.float().mean()))
    assert step.metrics["async/generated_length/max"] == int(lengths.max())
    assert step.metrics["async/age_1_kl_k3"] == pytest.approx(step.metrics["rollout/kl_k3"])
    # The whole batch is one mini-batch, so that also the update rejects the rows that the driver counts.
    rejected = step.metrics["actor/rollout_rs_masked_fraction" if bypass else "rollout_corr/rollout_rs_masked_fraction"]
    tokens, rows = (1 - rejected) * int(lengths.sum()), step.metrics["async/learned_length/mean"]
    assert tokens / rows == pytest.approx(round(tokens / rows), abs=1e-3)
    assert 0 < round(tokens / rows) < len(lengths)
    if not bypass:
        share = step.metrics["rollout_corr/rollout_rs_seq_masked_fraction"]
        assert round(tokens / rows) == round((1 - share) * len(lengths))


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seconds", [0.15, pytest.param(1.0, marks=pytest.mark.slow)])
def test_delays_change_nothing(staleness: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(delays.SECONDS, str(seconds))
    delayed = {**DELAYED, "custom_reward_function.path": delays.__file__, "custom_reward_function.num_workers": 3}
    overrides = {**GRPO, STALENESS: staleness, "trainer.test_freq": 2}
    undelayed = run_ppo(tmp_path, overrides, steps=5)
    for _ in range(2):
        assert_equal(undelayed, run_ppo(tmp_path, {**overrides, **delayed}, steps=5))


def test_a_validation_uses_the_weights_of_its_step_and_changes_no_batch(tmp_path: Path) -> None:
    overrides = {**GRPO, "trainer.total_training_steps": 4}
    without = run_ppo(tmp_path, {**overrides, STALENESS: 1}, steps=4)
    validated = {**overrides, "trainer.test_freq": 1, "trainer.val_before_train": True}
    first, *steps = run_ppo(tmp_path, {**validated, STALENESS: 1}, steps=4)
    of_emulation, *expected = run_ppo(tmp_path, validated, 4, emulation(1))
    assert first.metrics == of_emulation.metrics
    names = [name for name in steps[0].metrics if name.startswith("val")]
    assert len(names) > 3
    assert [{name: step.metrics[name] for name in names} for step in steps] == [
        {name: step.metrics[name] for name in names} for step in expected
    ]
    assert_equal(without, steps, (*MEASURED, "val"))
    assert len({step.metrics["val/reward/mean"] for step in steps}) > 1  # the weights of the validations differ


def test_rewards_of_the_next_batch_run_while_a_batch_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()
    monkeypatch.setenv(delays.CALLS, str(calls))
    overrides = {
        **GRPO,
        STALENESS: 1,
        "actor_rollout_ref.worker_cls": f"{delays.__name__}:{delays.ScoredEarly.__name__}",
        "custom_reward_function.path": delays.__file__,
        "custom_reward_function.name": "count_calls",
    }
    run_ppo(tmp_path, {**overrides, "trainer.total_training_steps": 3}, steps=1)  # the update of step 1 waits


def test_a_dead_rollout_is_named_with_what_the_trainer_waited_for(tmp_path: Path) -> None:
    settings = {**GRPO, STALENESS: 1, f"{ROLLOUT}.max_restarts": 0, "trainer.total_training_steps": 3}
    config = ppo_config(tmp_path, settings)
    with ppo_trainer(config).open(config) as trainer, Tracking([], RunInfo("p", "e", tmp_path, 3)) as tracking:
        trainer.prepare()
        group: Any = trainer.parts.rollout
        pid = group.spawned.pool.processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerError, match=rf"rank 0 of 1 of rollout \(process {pid}\) died in ") as caught:
            trainer.fit(tracking)
    assert any("At that time, step 1 " in note for note in caught.value.__notes__)


def test_a_trainer_that_generates_in_turn_refuses_stale_batches(tmp_path: Path) -> None:
    config = ppo_config(tmp_path, {**GRPO, STALENESS: 1})
    message = r"PPOTrainer generates and trains in turn, so it cannot follow async_training.max_staleness=1"
    with pytest.raises(ConfigError, match=message), PPOTrainer.open(config):
        pass
