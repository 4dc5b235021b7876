"""The state of any torch optimizer under the names of its parameters, for checkpoints.

    tensors, values = optimizer_state(optimizer, parameters)      # {"model.norm.weight/exp_avg": ...}, {}
    targets = optimizer_targets(optimizer, parameters, held, folder)   # empty tensors, laid out for this engine
    restore_optimizer(optimizer, parameters, targets, values)

`parameters` are the engine's by Hugging Face names: plain tensors, or DTensors over any mesh. Tensors keep
their bits; numbers that an optimizer keeps as Python objects go into `values`, which is JSON. What the config
says (rate, betas, weight decay) is no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.errors import CheckpointError

Held = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a checkpoint."""


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, other values) by `<parameter>/<key>`; the tensors are the optimizer's own, not copies."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    named = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    if len(named) != len(optimizer.state):
        nameless = len(optimizer.state) - len(named)
        raise CheckpointError(f"{_class(optimizer)} has state for {nameless} parameters that the model has no name for")
    for name, state in named.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                values[f"{name}/{key}"] = value
            else:
                raise CheckpointError(
                    f"{_class(optimizer)} keeps a {type(value).__name__} as '{key}' of {name}; a checkpoint holds "
                    "tensors, numbers and words. Choose an optimizer whose state is made of these"
                )
    return tensors, values


def optimizer_targets(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], held: Mapping[str, Held], folder: Path
) -> dict[str, Tensor]:
    """An empty tensor for each one that the checkpoint `folder` holds.

    State of the parameter's shape is laid out like the parameter (DTensors too); other state is a plain tensor.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    targets = {}
    for full, (shape, dtype) in held.items():
        name, key = split(full)
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in groups:
            raise CheckpointError(f"{folder} holds optimizer state of '{name}', which this engine does not train")
        if shape == tuple(parameter.shape) and shape:
            targets[full] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            group = groups[id(parameter)]
            # As torch does it: the counter stays on the CPU unless a kernel reads it on the device.
            stays = key == "step" and not (group.get("capturable") or group.get("fused"))
            targets[full] = torch.empty(shape, dtype=dtype, device="cpu" if stays else parameter.device)
    return targets


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Make `tensors` and `values` the whole state of `optimizer`."""
    optimizer.state.clear()
    for full, value in {**tensors, **values}.items():
        name, key = split(full)
        optimizer.state[parameters[name]][key] = value


def split(full: str) -> tuple[str, str]:
    """(parameter, key) of `<parameter>/<key>`."""
    name, _, key = full.rpartition("/")
    return name, key


def _class(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__
