"""Trace a model's forward pass into a flat operator graph.

    graph = trace(hf, inputs, run)     # of run(**inputs(rows)); raises TraceError with the reason

A `TorchFunctionMode` sees each call of torch in the order of the model's own code, so the graph computes what the
forward computes, bit for bit. The forward runs twice, with two numbers of rows: an integer argument that is
proportional to the number of rows becomes a product with it. Tracing fails if Python reads tensor values, if a tensor
is neither an input nor a weight, or on in-place writes. Used by `traced_decoder.py`, which also checks the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from camshaft.models.attention import Slots

TRACED_ROWS = (3, 5)
"""Numbers of rows of the two runs."""

METADATA = {"size", "dim", "ndimension", "stride", "numel", "nelement", "__len__", "is_contiguous", "is_floating_point"}
"""Methods that return no tensor and depend only on shapes and types."""


class TraceError(Exception):
    """The forward cannot be traced; the message gives the reason."""


class Inputs(Protocol):
    """Arguments of a run by name; each run has the same names."""

    def __call__(self, rows: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Ref:
    """A reference to an input, weight or module by name, or to the result of a call by number."""

    source: str | int
    item: int | None = None
    """Index into the results of a call that returns several."""


@dataclass(frozen=True)
class Call:
    func: Any
    args: Any
    kwargs: Any
    """Arguments with a `Ref` in place of each tensor and module."""
    shape: tuple[int, ...] | None
    """Shape of the returned tensor."""


def attend(slots: Slots, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Call `slots.attend` as one operator that a function mode sees."""
    if has_torch_function((query, key, value)):
        return handle_torch_function(attend, (query, key, value), slots, module, query, key, value, *rest)
    return slots.attend(module, query, key, value, *rest)


class TracedSlots:
    """A KV cache whose `attend` is traced as one operator."""

    def __init__(self, slots: Slots):
        self.slots = slots

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return attend(self.slots, module, query, key, value, *rest)


class CallTrace(TorchFunctionMode):
    """Record the calls of one run; `named` maps names to inputs, weights and modules."""

    def __init__(self, named: Mapping[str, Any]):
        super().__init__()
        self.calls: list[Call] = []
        self.refs = {id(value): Ref(name) for name, value in reversed(list(named.items()))}
        self.alive: list[Any] = list(named.values())  # ids are unique only among living objects

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        versions = [_version(tensor) for tensor in inputs]
        out = func(*args, **kwargs)
        if versions != [_version(tensor) for tensor in inputs]:
            raise TraceError(f"{_name(func)} writes in place")
        results = _tensors(out)
        if not results:
            if inputs and _name(func) not in METADATA and _name(func) != "__get__":
                raise TraceError(f"{_name(func)} reads the values of a tensor")
            return out
        new = [tensor for tensor in results if id(tensor) not in self.refs]
        if not new:
            return out  # returns its input: to() without a change, contiguous(), dropout()
        if not isinstance(out, Tensor) and not all(isinstance(one, Tensor) for one in out):
            raise TraceError(f"{_name(func)} returns more than tensors")
        shape = tuple(out.shape) if isinstance(out, Tensor) else None
        self.calls.append(Call(func, self._replace_with_refs(args), self._replace_with_refs(kwargs), shape))
        self.alive += results
        number = len(self.calls) - 1
        if isinstance(out, Tensor):
            self.refs[id(out)] = Ref(number)
        else:
            self.refs.update({id(one): Ref(number, item) for item, one in enumerate(out)})
        return out

    def ref(self, tensor: Tensor) -> Ref:
        if id(tensor) not in self.refs:
            raise TraceError(f"a tensor of shape {tuple(tensor.shape)} is neither an input nor a weight")
        return self.refs[id(tensor)]

    def _replace_with_refs(self, arguments: Any) -> Any:
        """Return arguments with a `Ref` in place of each tensor and module."""

        def replace(leaf: Any) -> Any:
            return self.ref(leaf) if isinstance(leaf, Tensor) else self.refs.get(id(leaf), leaf)

        return map_aggregate(arguments, replace)


def trace(hf: nn.Module, inputs: Inputs, run: Callable[..., Tensor]) -> Graph:
    """Trace `run(**inputs(rows))`; placeholders are the inputs and `rows`, attributes are names in `hf`."""
    recorders, outputs = [], []
    for rows in TRACED_ROWS:
        arguments = dict(inputs(rows))
        recorder = CallTrace(arguments | named_members(hf))
        with torch.inference_mode(False), torch.no_grad(), recorder:
            outputs.append(recorder.ref(run(**arguments)))
        recorders.append(recorder)
    return _Join(list(arguments)).graph(recorders[0].calls, recorders[1].calls, *outputs)


def named_members(hf: nn.Module) -> dict[str, Any]:
    """Return the modules, weights and buffers that a graph may refer to."""
    return {
        **{name: module for name, module in hf.named_modules() if name},
        **dict(hf.named_parameters(remove_duplicate=False)),
        **dict(hf.named_buffers(remove_duplicate=False)),
    }


class _Join:
    """Merge two runs into one graph."""

    def __init__(self, inputs: list[str]):
        self.fx = Graph()
        self.nodes: dict[Any, Node] = {name: self.fx.placeholder(name) for name in [*inputs, "rows"]}

    def graph(self, first: list[Call], second: list[Call], output: Ref, second_output: Ref) -> Graph:
        if len(first) != len(second) or output != second_output:
            raise TraceError("the calls differ with the number of rows")
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            if one.func != other.func:
                raise TraceError(f"{_name(one.func)} and {_name(other.func)}, depending on the number of rows")
            args, kwargs = self._merge_arguments((one.args, one.kwargs), (other.args, other.kwargs))
            node = self._call(one.func, args, kwargs)
            node.meta["shape"] = one.shape
            self.nodes[Ref(number)] = node
        self.fx.output(self._node(output))
        return self.fx

    def _call(self, func: Any, args: Any, kwargs: Any) -> Node:
        if _name(func) == "__get__":  # a property that returns a tensor
            return self.fx.call_function(getattr, (args[0], func.__self__.__name__))
        return self.fx.call_function(func, args, kwargs)

    def _node(self, ref: Ref) -> Node:
        if ref not in self.nodes:
            if ref.item is not None:
                self.nodes[ref] = self.fx.call_function(operator.getitem, (self.nodes[Ref(ref.source)], ref.item))
            elif ref.source in self.nodes:
                return self.nodes[ref.source]
            else:
                self.nodes[ref] = self.fx.create_node("get_attr", str(ref.source))
        return self.nodes[ref]

    def _merge_arguments(self, one: Any, other: Any) -> Any:
        if type(one) is not type(other):
            raise TraceError(f"{one} and {other}, depending on the number of rows")
        if isinstance(one, Ref) and one == other:
            return self._node(one)
        if isinstance(one, tuple | list) and len(one) == len(other):
            joined = [self._merge_arguments(a, b) for a, b in zip(one, other, strict=True)]
            return joined if isinstance(one, list) else tuple(joined)
        if isinstance(one, dict) and list(one) == list(other):
            return {key: self._merge_arguments(one[key], other[key]) for key in one}
        if isinstance(one, slice):
            return slice(
                *(self._merge_arguments(getattr(one, k), getattr(other, k)) for k in ("start", "stop", "step"))
            )
        if (
            type(one) is int
            and one != other
            and one * TRACED_ROWS[1] == other * TRACED_ROWS[0]
            and not one % TRACED_ROWS[0]
        ):
            return self.fx.call_function(operator.mul, (self.nodes["rows"], one // TRACED_ROWS[0]))
        if one != other:
            raise TraceError(f"{one} and {other}, depending on the number of rows")
        return one


def _tensors(value: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    map_aggregate(value, lambda leaf: leaves.append(leaf) if isinstance(leaf, Tensor) else None)
    return leaves


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
