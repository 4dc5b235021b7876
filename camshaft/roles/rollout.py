"""Role of the rollout, which generates responses with the weights of an engine.

    rollout.sync_weights()                  # wakes the rollout, which then has the weights of the engine
    rollout.generate_sequences(prompts)     # any number of calls
    rollout.sleep_rollout()

    rollout.receive_weights(snapshot)       # instead, on devices of its own: what the actor has published
    rollout.generate_sequences(prompts)

Without `sync_weights`, `generate_sequences` syncs the weights itself and then puts the rollout to sleep. It reads the
columns `prompts` and, if it exists, `sampling_seed`. It writes `responses`, `response_mask`, `rollout_log_probs` and
`finished`, with `enable_return_routed_experts` also `routed_experts`, and with `async_training.max_staleness` also
`policy_versions`.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from camshaft.config import PPOConfig, rollout_engine, sampling
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine
from camshaft.errors import RolloutError
from camshaft.reshard import (
    Snapshot,
    asleep_after_error,
    enter,
    is_entered,
    leave,
    machine_id,
    receive,
    receive_base,
    rollout_mode,
)
from camshaft.rollout import BaseRollout, Generation, SamplingParams, build_rollout
from camshaft.seat import Seat


class RolloutWorker(Worker):
    """A rollout that syncs its weights from `engine`, or one without an engine, on devices of its own."""

    rollout: BaseRollout
    """The rollout engine, created by `init_model`. With an engine, it sleeps outside of `sync_weights` and
    `sleep_rollout`; alone, it stays awake."""

    def __init__(self, config: PPOConfig, engine: BaseEngine | None = None):
        super().__init__()
        self.config, self.engine = config, engine
        self.params = {key: SamplingParams(**sampling(config, *key)) for key in product((False, True), repeat=2)}
        """Sampling parameters for each (validate, greedy)."""
        self.may_be_stale = config.async_training.max_staleness > 0
        self._batch_end = self._call_start = self._call_end = time.perf_counter()
        """End of the last batch, and start and end of the last call, of a rollout without an engine."""
        self._idle_seconds = 0.0
        """Time between its calls since the last batch."""

    @property
    def seat(self) -> Seat:
        return super().seat if self.engine is None else self.engine.seat

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the rollout, which may measure the free memory and use the process group of this rank."""
        self.rollout = build_rollout(self.config.actor_rollout_ref.rollout.name, rollout_engine(self.config))
        if self.engine is not None:
            self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sync_weights(self) -> dict[str, float]:
        """Wake the rollout, sync its weights and verify them. Return the metrics of the sync.

        The rollout stays awake until `sleep_rollout`, or until `generate_sequences` fails. If it shares the storage of
        the engine's weights, the engine does not train until then.
        """
        if self.engine is None:
            raise RolloutError("sync_weights: this rollout has no engine; pass one to its role, or load its weights")
        return enter(self.engine, self.rollout).metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Free the memory of the rollout. This has no effect without `sync_weights` before."""
        if is_entered(self.rollout):
            leave(self.rollout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_dtypes(self, sources: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Return the dtype in which the rollout receives each weight, given that in which the engine stores it."""
        return {name: self.rollout.sync_dtype(name, torch.empty(0, dtype=dtype)) for name, dtype in sources.items()}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, keeps_seats=True)
    def machine(self) -> str:
        """Return the machine of this rank, on which it can read snapshots."""
        return machine_id()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, keeps_seats=True)
    def receive_weights(self, snapshot: Snapshot) -> dict[str, float]:
        """Load and verify the weights that the actor has published. Return the metrics of the sync on this rank."""
        with self._busy():
            sync = receive(snapshot, self.rollout)
        return sync.metrics() | {"rollout/weights_version": float(self.rollout.version)}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, keeps_seats=True)
    def receive_base(self, snapshot: Snapshot) -> None:
        """Load the weights to which `receive_weights` adds adapters, and which it verifies."""
        receive_base(snapshot, self.rollout)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto, validate: bool = False, greedy: bool = False) -> DataProto:
        """Generate one response for each row with the sampling parameters of training or validation, or greedily."""
        params = self.params[validate, greedy]
        seeds = prompts["sampling_seed"] if "sampling_seed" in prompts else None  # noqa: SIM401
        with self._awake() as sync_metrics:
            start = time.perf_counter()
            out = self.rollout.generate_sequences(prompts.ragged("prompts"), params, seeds)
            seconds = time.perf_counter() - start
        metrics = {f"rollout/{name}": value for name, value in out.metrics.items() if name != "seconds"}
        metrics |= sync_metrics
        metrics["perf/rollout_tokens_per_second"] = len(out.responses.values) / max(seconds, 1e-9)
        if validate or greedy:  # the actor does not read these rows
            out = replace(out, routed_experts=None)
        generated = DataProto.from_dict(generation_columns(out), {"metrics": metrics})
        return self.with_versions(generated) if self.may_be_stale and not validate else generated

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score_responses(self, rows: DataProto) -> DataProto:
        """Return the log-probs of the responses at the temperature of training, and the version that computed them.

        Those of tokens beyond the limit of the rollout are 0, and False in the column `response_mask`.
        """
        responses = rows.ragged("responses")
        sampling = SamplingParams(max_tokens=1, temperature=self.params[False, False].temperature)
        tokens = Ragged.join(rows.ragged("prompts"), responses)
        with self._busy():
            lengths = tokens.lengths.clamp(max=self.rollout.max_scored_tokens)
            scored = self.rollout.score(tokens.prefix(lengths), sampling=sampling).log_probs.to("cpu")
        beyond = tokens.lengths - lengths
        missing = Ragged(scored.values.new_zeros(int(beyond.sum())), beyond)
        log_probs, version = Ragged.join(scored, missing).suffix(responses.lengths), self.rollout.version
        is_scored = log_probs.like(log_probs.positions() < (responses.lengths - beyond)[log_probs.row_ids()])
        versions = responses.map(lambda ids: torch.full_like(ids, version, dtype=torch.int32))
        columns = {"rollout_log_probs": log_probs, "response_mask": is_scored, "policy_versions": versions}
        return DataProto.from_dict(columns)

    def with_versions(self, generated: DataProto) -> DataProto:
        """Add the column `policy_versions`, and when the rollout generated and when it had no calls."""
        responses, version = generated.ragged("responses"), self.rollout.version
        versions = responses.map(lambda ids: torch.full_like(ids, version, dtype=torch.int32))
        now, idle = time.perf_counter(), self._idle_seconds
        share, self._batch_end, self._idle_seconds = idle / (now - self._batch_end), now, 0.0
        metrics = {"async/generator_idle": idle, "async/generator_idle_share": share}
        metrics |= {"async/generation": self._call_end - self._call_start, "timing/generated": time.time()}
        metrics |= generated.meta_info["metrics"]
        return generated.with_columns(policy_versions=versions).with_meta(metrics=metrics)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Measure the time between calls."""
        self._call_start = time.perf_counter()
        self._idle_seconds += self._call_start - self._call_end
        try:
            yield
        finally:
            self._call_end = time.perf_counter()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[dict[str, float]]:
        """Yield with the rollout awake, and the metrics of a sync if `sync_weights` has not been called before."""
        if self.engine is None:
            with self._busy():
                yield {}
        elif is_entered(self.rollout):
            with asleep_after_error(self.rollout):
                yield {}
        else:
            with rollout_mode(self.engine, self.rollout) as sync:
                yield sync.metrics()


def generation_columns(out: Generation) -> dict[str, Any]:
    """Convert the output of a rollout to the columns of a batch."""
    responses = out.responses.to("cpu")
    columns: dict[str, Any] = {
        "responses": responses,
        "response_mask": responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool)),
        "rollout_log_probs": out.log_probs.to("cpu"),
        "finished": out.finished.cpu(),
    }
    if out.routed_experts is not None:
        columns["routed_experts"] = out.routed_experts.to("cpu")
    return columns
