"""Role of the rollout, which generates responses with the weights of an engine.

`generate_sequences` reads the columns `prompts` and, if it exists, `sampling_seed`. It writes `responses`,
`response_mask`, `rollout_log_probs` and `finished`, and with `enable_return_routed_experts` also `routed_experts`.
"""

import time
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from camshaft.config import PPOConfig, rollout_engine, sampling
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto
from camshaft.engine import BaseEngine
from camshaft.reshard import rollout_mode
from camshaft.rollout import BaseRollout, Generation, SamplingParams, build_rollout
from camshaft.seat import Seat


class RolloutWorker(Worker):
    """A rollout that syncs its weights from `engine` before each call."""

    rollout: BaseRollout
    """The rollout engine, created by `init_model`. It sleeps between calls."""

    def __init__(self, config: PPOConfig, engine: BaseEngine):
        super().__init__()
        self.config, self.engine = config, engine
        self.params = {key: SamplingParams(**sampling(config, *key)) for key in product((False, True), repeat=2)}
        """Sampling parameters for each (validate, greedy)."""

    @property
    def seat(self) -> Seat:
        return self.engine.seat

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the rollout, which may measure the free memory and use the process group of this rank."""
        self.rollout = build_rollout(self.config.actor_rollout_ref.rollout.name, rollout_engine(self.config))
        self.rollout.sleep()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto, validate: bool = False, greedy: bool = False) -> DataProto:
        """Generate one response for each row with the sampling parameters of training or validation, or greedily."""
        params = self.params[validate, greedy]
        seeds = prompts["sampling_seed"] if "sampling_seed" in prompts else None  # noqa: SIM401
        start = time.perf_counter()
        with rollout_mode(self.engine, self.rollout) as sync:
            out = self.rollout.generate_sequences(prompts.ragged("prompts"), params, seeds)
        seconds = time.perf_counter() - start
        metrics = {f"rollout/{name}": value for name, value in out.metrics.items() if name != "seconds"}
        metrics |= sync.metrics()
        metrics["perf/rollout_tokens_per_second"] = len(out.responses.values) / max(seconds, 1e-9)
        if validate or greedy:  # the actor does not read these rows
            out = replace(out, routed_experts=None)
        return DataProto.from_dict(generation_columns(out), {"metrics": metrics})


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
