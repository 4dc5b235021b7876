"""Trainer that generates batches while earlier ones are learned, with a rollout on devices of its own.

    run(config, AsyncPPOTrainer.open)        # async_training.max_staleness=k

Before step b, the actor publishes the weights of version b - 1, and the batches that may now be generated are sent.
With k = 1, the rollout executes receive(0), generate(1), generate(2), receive(1), generate(3), receive(2), ... The
order of these calls is the schedule: no clock decides anything, so two runs are equal to the bit. `ledger.py` keeps the
books.

A validation after step v first sends receive(v), as the next step would, and runs after the batches that were already
sent. It therefore uses the weights of version v, and the batches are those of a run without validation.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from camshaft.algorithms import interpolated_log_probs
from camshaft.checkpoint import SavedCheckpoint, in_flight
from camshaft.config.backends import can_score
from camshaft.controller import Pending
from camshaft.data import StatefulLoader
from camshaft.dataproto import DataProto
from camshaft.errors import CamshaftError
from camshaft.rewards.manager import PendingScores
from camshaft.roles.sequences import SEQUENCES
from camshaft.trainer.advantages import compute_corrections
from camshaft.trainer.build import PPOParts, StartedGeneration
from camshaft.trainer.ledger import Ledger
from camshaft.trainer.metrics import (
    StepMetrics,
    learned_lengths,
    merge_ranks,
    mismatch_by_age,
    policy_ages,
    reduce_ranks,
    staleness,
)
from camshaft.trainer.ppo import PPOTrainer, Responses
from camshaft.trainer.probes import Probes
from camshaft.trainer.session import StepHook

BALANCED = 0.1
"""Share of waiting time below which neither side is called slower."""

logger = logging.getLogger(__name__)


class Pipeline:
    """Source of an asynchronous run, which yields the number of the batch to learn and draws the prompts of later ones.

    Its state is that of the loader before the oldest batch that is not learned, with the ledger. A synchronous run
    continues from it and generates the batches under way again.
    """

    def __init__(self, loader: StatefulLoader, ledger: Ledger):
        self.loader, self.ledger = loader, ledger
        self.drawn: dict[int, DataProto] = {}
        """Prompts of the batches that were under way in the state that was loaded."""

    @property
    def exhausted(self) -> bool:
        return self.loader.exhausted and not self.ledger.under_way()

    @property
    def steps_per_epoch(self) -> int:
        return self.loader.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        while not self.exhausted:
            yield self.ledger.last_learned + 1

    def draw(self, step: int, version: int) -> DataProto:
        """Draw the prompts of a batch that the weights of `version` generate."""
        position = self.loader.state_dict()
        prompts = self.loader.next_batch()
        self.ledger.sent(step, version, prompts["uid"], position)
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return {**(self.ledger.position or self.loader.state_dict()), "pipeline": self.ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, and draw the prompts of the batches under way again."""
        self.loader.load_state_dict(state)
        self.ledger.load_state_dict(state.get("pipeline", {}))
        self.drawn = {batch.step: self.loader.next_batch() for batch in self.ledger.under_way()}
        if any(tuple(self.drawn[batch.step]["uid"]) != batch.uids for batch in self.ledger.under_way()):
            self.withdraw("this run has other prompts in a batch")

    def withdraw(self, reason: str) -> None:
        """Return the batches under way to the loader."""
        logger.warning("the batches under way are generated again, because %s", reason)
        position = self.ledger.position
        self.ledger.withdraw()
        if position is not None:
            self.loader.load_state_dict(position)


@dataclass(frozen=True)
class Sent:
    """A batch that the rollout generates."""

    rows: DataProto
    generation: StartedGeneration
    scoring: PendingScores | None
    receipt: Pending[Any] | None
    """Call that loads the weights of the batch, if it is the first one that they generate."""


@dataclass(frozen=True)
class Received:
    """A generated batch."""

    rows: DataProto
    generated: DataProto
    """Columns that the rollout wrote, with metrics."""
    scoring: PendingScores | None


class AsyncPPOTrainer(PPOTrainer):
    """Training run with PPO or a related algorithm on batches that are up to `max_staleness` versions old."""

    def __init__(self, parts: PPOParts, on_step: Sequence[StepHook] = ()):
        super().__init__(parts, on_step)
        assert parts.snapshot_sync is not None, "validated by the config"
        self.weights = parts.snapshot_sync
        self.ledger = Ledger(self.config.async_training.max_staleness, parts.total_steps)
        self.source = self.pipeline = Pipeline(parts.loader, self.ledger)
        self._sent: dict[int, Sent] = {}
        self._received: dict[int, Received] = {}
        """Batches that are not learned, and the one that is being learned."""
        assert parts.rollout is not None
        rollout = self.config.actor_rollout_ref.rollout
        is_scored = can_score(rollout.name, rollout.engine_kwargs, rollout.temperature)
        self.probes = Probes(parts.rollout, parts.rollout_dp_size) if is_scored else None
        self._collected_at: float | None = None
        self._shares: list[tuple[float, float]] = []
        """Shares of time of each step for which the trainer waited and the generator was idle."""

    def collect(self, inputs: Any, metrics: StepMetrics) -> Responses:
        """Publish the weights, send the batches that they may generate, and wait for batch `inputs`."""
        version = inputs - 1
        with metrics.phase("sync"), _naming(f"step {inputs} publishes the weights of version {version}"):
            receipt = self.weights.start(version)
        for step in self.ledger.due(version):
            self._send(step, version, receipt)
            receipt = None
        with metrics.phase("gen"):
            received = self._receive(inputs)
        metrics.add({"timing/received": time.time()})
        self._received = {step: batch for step, batch in self._received.items() if step >= inputs}
        metrics.add(self.ledger.learned(inputs))
        if self.probes is not None:
            metrics.add(self.probes.collect(version - self.ledger.max_staleness))
        batch = metrics.union(received.rows.drop(*self.parts.replaced), received.generated)
        ages = policy_ages(batch, version)
        metrics.add(staleness(batch, ages) | self._waited(metrics))
        if self.config.algorithm.rollout_correction.interpolates():
            batch = batch.with_columns(policy_ages=ages)
        return batch, received.scoring

    def compare(self, batch: DataProto) -> dict[str, float]:
        """Compare the log-probs also by the age of the tokens, and the rows that are learned with all of them."""
        ages, correction = policy_ages(batch, self.global_step - 1), self.config.algorithm.rollout_correction
        if self.probes is not None and SEQUENCES not in batch:
            self.weights.keep_for(self.probes.start(self.global_step, batch))
        metrics = super().compare(batch) | mismatch_by_age(batch, ages)
        if correction.bypass_mode and correction.rollout_rs:  # the update rejects tokens, here of its first mini-batch
            if correction.interpolates():
                train, rollout = batch.ragged("old_log_probs"), batch["rollout_log_probs"].values
                estimate = interpolated_log_probs(train.values, rollout, ages.values)
                batch = batch.with_columns(old_log_probs=train.like(estimate))
            batch = batch.union(compute_corrections(batch, correction)[0].select("rollout_rs_mask"))
        return metrics | learned_lengths(batch)

    def _send(self, step: int, version: int, receipt: Pending[Any] | None) -> None:
        """Start to generate a batch. Its responses are scored when they arrive."""
        rows = self.rows_to_generate(self.pipeline.draw(step, version), step)
        if self.probes is not None:
            self.probes.prepare()
        generation = self.parts.start_generation(rows)
        self._sent[step] = Sent(rows, generation, generation.begin_scoring(), receipt)

    def _receive(self, step: int) -> Received:
        """Wait for a batch, which is kept until it is learned."""
        if step not in self._received:
            sent = self._sent.pop(step)
            with _naming(f"step {self.global_step} waits for batch {step}"):
                generated = sent.generation.responses()
            measured = reduce_ranks(generated)
            if sent.receipt is not None:
                measured |= merge_ranks(sent.receipt.result())
                measured.pop("timing_s/sync")  # of the rollout, which the step does not wait for
            generated = DataProto(generated.columns, {"metrics": measured})
            self.ledger.received(step, generated["policy_versions"].values.unique().tolist())
            self._received[step] = Received(sent.rows, generated, sent.scoring)
        return self._received[step]

    def _waited(self, metrics: StepMetrics) -> dict[str, float]:
        """Return the time for which the step waited for its batch, and its share of the time since the last one."""
        seconds, now, last = metrics.values["timing_s/gen"], time.monotonic(), self._collected_at
        self._collected_at = now
        if last is None:
            return {"async/trainer_wait": seconds}
        share = seconds / max(now - last, seconds)
        self._shares.append((share, metrics.values["async/generator_idle_share"]))
        return {"async/trainer_wait": seconds, "async/trainer_wait_share": share}

    def finish(self) -> None:
        """Log which side of the run waited for the other."""
        super().finish()
        if self._shares:
            logger.info("%s", summary(*(sum(shares) / len(shares) for shares in zip(*self._shares, strict=True))))

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Wait for the batches under way, and return the state with them."""
        batches = {batch.step: self._receive(batch.step).generated for batch in self.ledger.under_way()}
        reported = self.global_step - 1 - self.ledger.max_staleness
        probes = {} if self.probes is None else self.probes.state_dict(after=reported)
        return super().state() | in_flight.store(batches) | {"probes": probes}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state and the batches under way, and start to score them again."""
        super().load_state(state)
        if self.probes is not None:
            self.probes.load_state_dict(state.get("probes", {}))
        steps = [] if self.only_validates else [batch.step for batch in self.ledger.under_way()]
        if any(str(step) not in state[in_flight.IN_FLIGHT] for step in steps):
            self.pipeline.withdraw("the checkpoint cannot contain results of reward functions")
            return
        stored = {step: in_flight.load(step, state) for step in steps}
        rows = {step: self.rows_to_generate(self.pipeline.drawn[step], step) for step in steps}
        if any(len(rows[step]) != len(stored[step]) for step in steps):
            self.pipeline.withdraw("this run has another number of responses to a prompt")
            return
        for step, generated in stored.items():
            generated.meta_info["metrics"].pop("timing/generated", None)  # before the run was interrupted
            scoring = self.parts.rewards.begin(rows[step])
            if scoring is not None:
                scoring.add(0, self.parts.decode([row.tolist() for row in generated.ragged("responses").rows()]))
            self.ledger.received(step, generated["policy_versions"].values.unique().tolist())
            self._received[step] = Received(rows[step], generated, scoring)

    def prepare(self) -> SavedCheckpoint | None:
        saved = super().prepare()
        self.ledger.last_learned = self.global_step  # a synchronous run has saved no ledger
        return saved


def summary(wait: float, idle: float) -> str:
    """Return a sentence about the shares of time for which the trainer waited and the generator was idle."""
    advice = "generation is slower: more rollout devices help"
    if wait <= idle:
        advice = "training is slower: more rollout devices will not help"
    if max(wait, idle) < BALANCED:
        advice = "the two sides are balanced"
    return f"the trainer waited {wait:.0%} of the time, the generator {idle:.0%}; {advice}"


@contextlib.contextmanager
def _naming(action: str) -> Iterator[None]:
    """Add to an error what the trainer was doing when it occurred."""
    try:
        yield
    except CamshaftError as error:
        error.add_note(f"At that time, {action}.")
        raise
