"""vLLM as a generator, in the processes of the trainer.

    rollout = VLLMRollout(RolloutEngineConfig(model_path="models/tiny", device="cuda"))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

This file says what the contract asks for in terms of vLLM; `engine.py` is the one that talks to it. With
`tensor_model_parallel_size` above 1, that many consecutive ranks are one generator: they put their rows together,
generate them all, and each keeps its own. With `config.lora`, `load_weights` brings the base model once, and
`load_adapter` what is added to it, each time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import here, world_size
from camshaft.digest import noted
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams
from camshaft.rollout.external import RowRequest
from camshaft.rollout.vllm.base import BaseVLLMRollout
from camshaft.rollout.vllm.engine import VLLMEngine
from camshaft.rollout.weights.checks import ExpectedWeights, drop_tied_duplicates


class VLLMRollout(BaseVLLMRollout):
    """See the map above. `seeds` decide each row's samples."""

    takes_adapter = True

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        _check_ranks(config.tensor_model_parallel_size)
        _check_device(config.device)
        self._came: dict[str, int] | None = None
        self._adapter = None if config.lora is None else ExpectedWeights.adapter_of_folder(config, config.lora)
        self._adapter_came = False
        self.engine = VLLMEngine.acquire(config)
        self.engine.wake_up()
        weakref.finalize(self, self.engine.release).atexit = False

    # -- weights --------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.ready_to_load()
        self._came, self._adapter_came = None, False
        came: dict[str, int] = {}
        arriving = noted(self.expected.validate(weights), came)
        self.engine.load(drop_tied_duplicates(arriving, self.expected.canonical_names, set()))
        self._came = came

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._adapter is None:
            raise RolloutError("load_adapter: this generator was built without config.lora; hand over merged weights")
        self.ready_to_load()
        if self._came is None:
            raise RolloutError("load_adapter: the base weights are not there; call load_weights() with them before")
        self._adapter_came = False
        self.engine.load_adapter(self._adapter.validate(weights))
        self._adapter_came = True

    def weight_digests(self) -> Mapping[str, int]:
        """Of what vLLM holds, and for weights that it fuses, splits or packs, of what arrived at its loader.

        Of an adapter, always of what it holds.
        """
        self.ready()
        assert self._came is not None
        weights = self.expected.weights
        held = self.engine.digests({name: weight.meta for name, weight in weights.items()})
        digests = {name: held.get(weights[name].names[0], arrived) for name, arrived in self._came.items()}
        if self._adapter is not None:
            digests |= self.engine.adapter_digests({name: w.meta for name, w in self._adapter.weights.items()})
        return digests

    def ready(self) -> None:
        if self._came is not None and not self._asleep and not self.has_weights():
            raise RolloutError("the rollout has its base weights, but no adapter: call load_adapter() after wake_up()")
        super().ready()

    def has_weights(self) -> bool:
        return self._came is not None and (self._adapter is None or self._adapter_came)

    # -- memory ---------------------------------------------------------------------------------------

    def sleep(self) -> None:
        keep = self._adapter is not None and self._came is not None
        self.engine.sleep(keep_weights=keep)
        self._asleep, self._came, self._adapter_came = True, self._came if keep else None, False

    def wake_up(self) -> None:
        self.engine.wake_up()
        self._asleep = False

    # -- tokens ---------------------------------------------------------------------------------------

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        start = time.perf_counter()
        requests, error = _attempt(lambda: self.build_requests(prompts, sampling, seeds))
        everybody, own = self._with_neighbours(requests, error)
        stop_ids = self.all_stop_ids(sampling)
        answers = self.engine.generate(everybody, sampling, stop_ids)[own] if everybody else []
        return self.build_generation(prompts, answers, time.perf_counter() - start)

    def _with_neighbours(
        self, requests: list[RowRequest], error: RolloutError | None
    ) -> tuple[list[RowRequest], slice]:
        """The rows of all ranks of this generator, and which are this rank's. An error of one is everybody's."""
        group = self.engine.group
        if group is None:
            if error is not None:
                raise error
            return requests, slice(0, len(requests))
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (requests, None if error is None else str(error)), group=group)
        if error is not None:
            raise error
        for rank, (_, told) in enumerate(gathered):
            if told is not None:
                raise RolloutError(f"rank {rank} of this generator cannot generate: {told}")
        counts = [len(rows) for rows, _ in gathered]
        first = sum(counts[: dist.get_rank(group)])
        return [row for rows, _ in gathered for row in rows], slice(first, first + len(requests))


def _attempt(make: Any) -> tuple[list[RowRequest], RolloutError | None]:
    """The requests, or the error that the other ranks have to hear of before it is raised."""
    try:
        return make(), None
    except RolloutError as error:
        return [], error


def _check_ranks(parallel: int) -> None:
    world = world_size()
    if world % parallel:
        raise RolloutError(
            f"tensor_model_parallel_size={parallel} does not divide the {world} rank{'s' * (world > 1)} of this run; "
            f"set actor_rollout_ref.rollout.tensor_model_parallel_size to 1 or another divisor of {world}"
        )


def _check_device(device: str) -> None:
    """A rank alone: vLLM goes to the first device that it sees, whatever is current."""
    place = torch.device(device)
    if place.type == "cpu" or world_size() > 1 or not torch.accelerator.is_available():
        return
    own = here(device).index
    if own != 0:
        raise RolloutError(
            f"vLLM in one process generates on {place.type}:0, and the device is {place.type}:{own}; let this process "
            f"see that one alone (CUDA_VISIBLE_DEVICES={own}) and leave the number out"
        )
