"""Extrapolates the memory of a model with many layers from traces of models with few layers.

    layers = choose_layers(kinds)                   # kinds of the layers, such as ("full",) * 80
    layers.traced                                   # (4, 6)
    extrapolate(layers, [trace_of_4, trace_of_6])   # phases of the model with 80 layers

Layers that are alike need equal memory, so each part of a phase grows linearly with their number: activations and
weights by a constant per layer. Everything else does not depend on the number of layers. The peak of a phase can move
to another part as the number of layers grows, for example from the gradients of the embedding to the first layer of the
backward pass. Therefore the parts are extrapolated one by one. A part is the time that a phase spends in one of the
first or last layers, or outside of the layers.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from camshaft.errors import EngineError
from camshaft.planning.tensor_memory import Part, TensorMemory

AT_EACH_END = 2
"""Minimum number of layers at each end of the model whose parts are compared."""


class Phase(NamedTuple):
    """Memory of one phase on rank 0, in bytes."""

    role: str
    name: str
    """`build`, or the name of the phase in the metrics of a run."""
    peak: int
    """Maximum of the live tensors; of those on the device, if the run uses one."""
    rest: int
    """Live tensors after the phase."""
    disk: int = 0
    """Size of a checkpoint of the role on all ranks, for the phase `save`."""
    host: int = 0
    """Maximum of the live tensors in host memory, if the run uses a device."""


class Trace(NamedTuple):
    """A phase, and the peaks of its parts in the order of their execution."""

    phase: Phase
    parts: list[Part]


class Layers(NamedTuple):
    """Numbers of layers of a model and of the models that are traced for it."""

    count: int
    traced: tuple[int, ...]
    """Two numbers, or only `count`."""
    first: int = 0
    """Number of first layers whose parts are compared."""
    last: int = 0


def choose_layers(kinds: Sequence[Hashable]) -> Layers:
    """Choose the numbers of layers to trace for a model whose layers are of these kinds.

    The kinds repeat with a period, except for some at the start. The traced models start and end with the same kinds of
    layers as the model.
    """
    count = len(kinds)
    start, period = _repetition(kinds)
    first, last = start + max(AT_EACH_END, period), max(AT_EACH_END, period)
    fewest = first + last + (count - first - last) % period
    most = fewest + (2 if period == 1 else period)
    return Layers(count, (count,)) if most >= count else Layers(count, (fewest, most), first, last)


def _repetition(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """Return the start and the period with the smallest sum such that kinds[i] == kinds[i + period] for i >= start."""
    pairs = [(start, period) for period in range(1, len(kinds) + 1) for start in range(len(kinds) - period + 1)]
    for start, period in sorted(pairs, key=lambda pair: (sum(pair), pair[1])):
        if all(kinds[i] == kinds[i + period] for i in range(start, len(kinds) - period)):
            return start, period
    return 0, 1


def decoder_layers(hf: PreTrainedModel) -> nn.ModuleList:
    count = hf.config.get_text_config().num_hidden_layers
    for module in hf.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise EngineError(f"{type(hf).__name__} has no list of {count} layers, so its memory cannot be forecast")


def layer_kinds(hf: PreTrainedModel) -> list[Hashable]:
    """Return the kind of each layer: its class, the shapes of its weights, and its type of attention."""
    layers = decoder_layers(hf)
    types = getattr(hf.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    shapes = [tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers]
    return [(type(layer), *item) for layer, *item in zip(layers, shapes, types, strict=True)]


def mark_layers(hf: PreTrainedModel, memory: TensorMemory) -> None:
    """Start a part of the phase at each layer of the forward and of the backward pass."""
    layers = decoder_layers(hf)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(_before(memory, index))
        layer.register_forward_hook(_after(memory, index, is_last=index + 1 == len(layers)))


def _before(memory: TensorMemory, index: int) -> Callable[[nn.Module, Any], None]:
    def before(_module: nn.Module, args: Any) -> None:
        memory.mark(("forward", index))
        if index == 0 and args and isinstance(args[0], Tensor) and args[0].requires_grad:
            args[0].register_hook(lambda _: memory.mark(None))

    return before


def _after(memory: TensorMemory, index: int, is_last: bool) -> Callable[[nn.Module, Any, Any], None]:
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(lambda _: memory.mark(("backward", index)))
        if is_last:
            memory.mark(None)

    return after


def extrapolate(layers: Layers, traces: Sequence[Sequence[Trace]]) -> list[Phase]:
    """Return the phases of the model, from the traces of the models with `layers.traced` layers."""
    if len(traces) == 1:
        return [trace.phase for trace in traces[0]]
    return [_extrapolate_phase(layers, few, more) for few, more in zip(*traces, strict=True)]


def _extrapolate_phase(layers: Layers, few: Trace, more: Trace) -> Phase:
    fewest, most = layers.traced
    pairs = list(zip(_parts_at_ends(few, layers, fewest), _parts_at_ends(more, layers, most), strict=True))
    if few.phase[:2] != more.phase[:2] or any(one.label != other.label for one, other in pairs):
        raise EngineError(
            f"the phase {few.phase.name} has other parts with {fewest} and {most} layers, so its memory cannot be "
            "extrapolated"
        )
    steps = (layers.count - fewest) / (most - fewest)

    def line(one: int, other: int) -> int:
        return max(0, round(one + steps * (other - one)))

    return Phase(
        *few.phase[:2],
        peak=max(line(one.peak, other.peak) for one, other in pairs),
        rest=line(few.phase.rest, more.phase.rest),
        disk=line(few.phase.disk, more.phase.disk),
        host=max(line(one.host_peak, other.host_peak) for one, other in pairs),
    )


def _parts_at_ends(trace: Trace, layers: Layers, count: int) -> list[Part]:
    """Return the parts outside of the layers, and those of the first and last layers, counted from the ends."""
    parts: list[Part] = []
    for part in trace.parts:
        if part.label is None:
            parts.append(part)
            continue
        direction, index = part.label
        if index >= count - layers.last:
            parts.append(part._replace(label=(direction, index - count)))
        elif index < layers.first:
            parts.append(part)
    return parts
