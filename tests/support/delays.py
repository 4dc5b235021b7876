"""Roles and a scoring function that take a random time, which must not change a run.

overrides = {**DELAYED, "custom_reward_function.path": delays.__file__}
monkeypatch.setenv(SECONDS, "0.2")
"""

import os
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from camshaft.config.backends import TORCH
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.ragged import Ragged
from camshaft.reshard import Snapshot
from camshaft.roles import ActorRolloutRefWorker, RolloutWorker
from camshaft.rollout import SamplingParams, UnsupportedSampling
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.scoring import PromptScores
from support.even_digits import compute_score as count_even_digits

SECONDS = "CAMSHAFT_TEST_DELAY"
"""Environment variable with the longest delay, in seconds."""
CALLS = "CAMSHAFT_TEST_CALLS"
"""Environment variable with the folder in which `count_calls` creates a file for each call."""
PATIENCE = 60.0
_random = random.SystemRandom()


def wait() -> None:
    time.sleep(_random.uniform(0, float(os.environ[SECONDS])))


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    time.sleep(_random.uniform(0, float(os.environ[SECONDS]) / 8))
    return count_even_digits(data_source, solution_str, ground_truth, extra_info)


class DelayedRollout(RolloutWorker):
    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def receive_weights(self, snapshot: Snapshot) -> dict[str, float]:
        wait()
        return super().receive_weights(snapshot)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto, validate: bool = False, greedy: bool = False) -> DataProto:
        wait()
        return super().generate_sequences(prompts, validate, greedy)


class DelayedPolicy(ActorRolloutRefWorker):
    rollout_class = DelayedRollout

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def publish(self, version: int) -> Snapshot | None:
        wait()
        return super().publish(version)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto, *arguments: Any, **options: Any) -> DataProto:
        wait()
        return super().update_actor(data, *arguments, **options)


class ScoredEarly(ActorRolloutRefWorker):
    """A policy whose updates wait until the reward function has scored more responses than those of the update.

    The reward function is `count_calls`. The environment variable `CALLS` is a folder.
    """

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto, *arguments: Any, **options: Any) -> DataProto:
        deadline = time.monotonic() + PATIENCE
        while len(list(Path(os.environ[CALLS]).iterdir())) < 2 * len(data):
            if time.monotonic() > deadline:
                raise TimeoutError("the next batch is not scored before the update")
            time.sleep(0.05)
        return super().update_actor(data, *arguments, **options)


def count_calls(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    (Path(os.environ[CALLS]) / uuid.uuid4().hex).touch()
    return count_even_digits(data_source, solution_str, ground_truth, extra_info)


DELAYED = {"actor_rollout_ref.worker_cls": f"{__name__}:{DelayedPolicy.__name__}"}


class Inaccurate(TorchRollout):
    """Computes with weights that are not those that it has received and verified."""

    def weight_digests(self) -> Mapping[str, int]:
        digests = dict(super().weight_digests())
        with torch.no_grad():
            for parameter in self.model.hf.parameters():
                parameter.data = parameter.data * 1.02
        return digests


class Limited(TorchRollout):
    """Scores only rows that are shorter than the longest ones, and only at temperature 1, as vLLM does."""

    capabilities = replace(TORCH, scores_sampling=False)

    @property
    def max_scored_tokens(self) -> int:
        return self.config.max_model_len - 1

    def score(
        self,
        prompts: Ragged,
        top_k: int = 0,
        candidates: Ragged | None = None,
        sampling: SamplingParams | None = None,
    ) -> PromptScores:
        if sampling is not None and not sampling.is_plain:
            raise UnsupportedSampling("temperature 1 only")
        return super().score(prompts, top_k, candidates, sampling)
