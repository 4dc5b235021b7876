"""Role of `camshaft serve` that samples: a rollout of each base model, with one published version at a time.

    worker.set_version("v1", snapshots)            # published by the ranks that train (served.py)
    worker.sample("models/tiny", "v1", prompts, SamplingParams(max_tokens=16), seeds)

`SamplingWorker` is on devices of its own (`sampling_ranks`). Otherwise the ranks that train also sample.

An error that a client can cause is returned as a `Refusal`, because an exception ends the worker process, and all
models with it. If one rank has an error, all ranks return it: none waits for another one in the next command.
"""

import functools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.serve import ServeConfig
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.device import host_backend
from camshaft.engine import Group, on_every_rank
from camshaft.errors import CamshaftError, EngineError
from camshaft.reshard import Snapshot, machine_id
from camshaft.roles.rollout import generation_columns
from camshaft.roles.versions import VERSIONS, LostWeightsError, ReceivedVersions
from camshaft.rollout import BaseRollout, ExpectedWeights, SamplingParams, build_rollout

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Refusal:
    """An error that leaves the worker usable, in place of the result of a call."""

    message: str
    is_vague: bool = False
    """True if another rank may know the cause."""
    has_lost_weights: bool = False
    """True if the weights can be published again."""


class ElsewhereError(EngineError):
    """An error whose cause is in the rows or the weights of another rank."""


def refusing(method: F) -> F:
    """Return errors of this package and of files instead of raising them. If a rank has one, all ranks return it."""

    @functools.wraps(method)
    def call(worker: "SamplingRole", *args: Any, **kwargs: Any) -> Any:
        result, refusal = None, None
        try:
            result = method(worker, *args, **kwargs)
        except (CamshaftError, OSError) as error:  # such as a full disk
            refusal = Refusal(
                str(error), isinstance(error, ElsewhereError), has_lost_weights=isinstance(error, LostWeightsError)
            )
        refusals = [found for found in on_every_rank(worker.group, lambda: refusal) if found is not None]
        return min(refusals, key=lambda found: found.is_vague, default=result)

    return call  # pyright: ignore[reportReturnType]


class Loader(Protocol):
    """Published weights that a rollout can load."""

    def load(self, name: str, rollout: BaseRollout) -> None: ...


class SamplingRole(Worker):
    """Rollouts of the base models on one device. All ranks have the same versions."""

    def __init__(self, config: ServeConfig):
        super().__init__()
        self.config = config
        self.group = cast(Group, dist.new_group(backend=host_backend()) if self.world > 1 else None)
        """Process group that exchanges errors and handles of memory."""
        self.rollouts: OrderedDict[str, BaseRollout] = OrderedDict()
        """Rollouts of base models, by their folders. The first one has not been used for the longest time."""
        self.held: dict[str, str] = {}
        """Version that the rollout of a base model holds."""

    @property
    @abstractmethod
    def loader(self) -> Loader: ...

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    @refusing
    def sample(self, base: str, version: str, prompts: Ragged, sampling: SamplingParams, seeds: Tensor) -> DataProto:
        """Sample one response for each prompt of this rank; the columns are those of `generation_columns`."""
        rollout = self._rollout(base)
        rollout.check_sampling(sampling)
        self._load_version(rollout, base, version)
        return DataProto.from_dict(generation_columns(rollout.generate_sequences(prompts, sampling, seeds)))

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    @refusing
    def score(
        self,
        base: str,
        version: str,
        prompts: Ragged,
        top_k: int,
        candidates: Ragged | None,
        sampling: SamplingParams | None,
    ) -> DataProto:
        """Return the log-probs of given tokens of this rank; the columns are fields of `PromptScores`."""
        rollout = self._rollout(base)
        self._load_version(rollout, base, version)
        scores = rollout.score(prompts, top_k, candidates, sampling).to("cpu")
        return DataProto.from_dict({name: column for name, column in vars(scores).items() if column is not None})

    def _load_version(self, rollout: BaseRollout, base: str, version: str) -> None:
        """Load published weights into the rollout of a base model, unless it holds them."""
        if self.held.get(base) != version:
            self.held.pop(base, None)
            self.loader.load(version, rollout)
            self.held[base] = version

    def _rollout(self, base: str) -> BaseRollout:
        """Return the rollout of a base model, which is built when it is needed."""
        if base not in self.rollouts:
            while len(self.rollouts) >= self.config.max_samplers:
                unused, rollout = self.rollouts.popitem(last=False)
                self.held.pop(unused, None)
                rollout.sleep()
            config = self.config.rollout_config(base, self.device)
            self.rollouts[base] = build_rollout(self.config.rollout, config)
        self.rollouts.move_to_end(base)
        return self.rollouts[base]


class SamplingWorker(SamplingRole):
    """Rollouts on devices of their own, which load what the ranks that train have published."""

    def __init__(self, config: ServeConfig):
        super().__init__(config)
        self.versions = ReceivedVersions(Path(config.folder).absolute() / VERSIONS)

    @property
    def loader(self) -> Loader:
        return self.versions

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @refusing
    def weight_dtypes(self, base: str) -> dict[str, torch.dtype]:
        """Return the dtype in which the rollout of a base model receives each weight."""
        rollout = self._rollout(base)
        names = ExpectedWeights.from_config(rollout.config).weights
        return {name: rollout.sync_dtype(name, weight.meta) for name, weight in names.items()}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, keeps_seats=True)
    def machine(self) -> str:
        """Return the machine of this rank, on which it can read snapshots."""
        return machine_id()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_version(self, version: str, snapshots: Sequence[Snapshot]) -> None:
        """Make published weights known, with the snapshots of all machines."""
        self.versions.add(version, snapshots)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def remove_version(self, version: str) -> None:
        """Forget published weights, which no call may use afterwards."""
        self.versions.remove(version)
