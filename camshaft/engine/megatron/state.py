"""Weights and optimizer state of a Megatron model under the names of the transformers model, for checkpoints.

    mirror = Mirror(blocks, data_parallel, optim_config)
    mirror.read()          # copies the state of the model into the mirror
    mirror.write()         # copies the state of the mirror into the model

A checkpoint stores full weights and optimizer tensors by the names that transformers uses, so that engines with any
layout can load it. The mirror holds this rank's parts of them as DTensors, which `engine/checkpoint.py` saves and
loads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from camshaft.config.engine import OptimConfig
from camshaft.engine.megatron.data_parallel import DataParallel
from camshaft.engine.megatron.weights import Block, WeightStore, join_parameters, shards_by_name
from camshaft.engine.optim import build_optimizer


class Mirror:
    """Parameters by the names of transformers, and an optimizer for them with the class of the engine's optimizer."""

    def __init__(self, blocks: Sequence[Block], store: WeightStore, optim: OptimConfig | None):
        self._blocks, self._store = blocks, store
        self._data_parallel = store if isinstance(store, DataParallel) else None
        shards = shards_by_name(blocks, store)
        weights = {weight.name: weight for block in blocks for weight in block.weights}
        self.weights = {name: weight.as_dtensor(shards[name]()) for name, weight in weights.items()}
        self.parameters: dict[str, Tensor] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        if optim is not None:
            self.parameters = {name: nn.Parameter(weight) for name, weight in self.weights.items()}
            self.optimizer = build_optimizer(self.parameters.values(), optim)  # pyright: ignore[reportArgumentType]

    def read(self) -> None:
        """Copy the optimizer state of the model into the mirror."""
        data_parallel = self._data_parallel
        if self.optimizer is None or data_parallel is None or not data_parallel.has_state():
            return
        for block in self._blocks:
            states = [data_parallel.state_of(parameter) for parameter in block.parameters]
            for key, value in states[0].items():
                is_split = isinstance(value, Tensor) and value.shape == block.parameters[0].shape
                values = [state[key] for state in states]
                parts = block.split(values) if is_split else [_copy(value) for _ in block.weights]
                for weight, part in zip(block.weights, parts, strict=True):
                    entry = weight.as_dtensor(part) if is_split else part
                    self.optimizer.state[self.parameters[weight.name]][key] = entry

    def write(self) -> None:
        """Copy the weights and the optimizer state of the mirror into the model."""
        join_parameters(self._blocks, self._store, {name: weight.to_local() for name, weight in self.weights.items()})
        data_parallel = self._data_parallel
        if self.optimizer is None or data_parallel is None:
            return
        data_parallel.optimizer.state.clear()
        for block in self._blocks:
            states = [self.optimizer.state.get(self.parameters[weight.name], {}) for weight in block.weights]
            new_states: list[dict[str, Any]] = [{} for _ in block.parameters]
            for key, value in states[0].items():
                if isinstance(value, DTensor):
                    parts = block.join([state[key].to_local() for state in states])
                else:
                    parts = [_copy(value) for _ in block.parameters]
                for state, part in zip(new_states, parts, strict=True):
                    state[key] = part
            for parameter, state in zip(block.parameters, new_states, strict=True):
                if state:
                    data_parallel.set_state(parameter, state)


def _copy(value: Any) -> Any:
    """Copy a tensor, because optimizers update their step counters in place."""
    return value.clone() if isinstance(value, Tensor) else value
