"""Trace a model's forward pass into a flat operator graph.

    graph = trace(hf, inputs, run)     # traces run(**inputs(rows)); raises TraceError with the reason

A `TorchFunctionMode` records the torch calls of the forward. The graph repeats these calls in the same order, so its
results are bitwise equal to those of the forward. The forward runs with two batch sizes. An integer argument that is
proportional to the batch size becomes a product with the batch size in the graph. Tracing fails if Python code reads
tensor values, if a tensor is neither an input nor a weight, or if an operator writes in place. `traced_decoder.py` uses
this module and verifies the result.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from camshaft.models.attention import Slots
from camshaft.models.blockwise import Scores
from camshaft.models.recurrent import RecurrentLayer

TRACED_BATCH_SIZES = (3, 5)
"""Batch sizes of the two runs of the forward."""

METADATA = {"size", "dim", "ndimension", "stride", "numel", "nelement", "__len__", "is_contiguous", "is_floating_point"}
"""Tensor methods that return no tensor and depend only on the shape, the strides and the dtype."""


class TraceError(Exception):
    """The forward cannot be traced. The message contains the reason."""


@dataclass(frozen=True)
class Ref:
    """A reference to an input, weight or module by name, or to the result of a call by its number."""

    source: str | int
    item: int | None = None
    """Index into the results of a call that returns several tensors."""


@dataclass(frozen=True)
class Call:
    """A recorded call of torch. In its arguments, a `Ref` replaces each tensor and module."""

    func: Any
    args: Any
    kwargs: Any
    shape: tuple[int, ...] | None
    """Shape of the returned tensor, or None if the call returns several tensors."""


def attend(slots: Slots, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    """Call `slots.attend` as one operator that a `TorchFunctionMode` can intercept."""
    if has_torch_function((query, key, value)):
        return handle_torch_function(attend, (query, key, value), slots, module, query, key, value, *args)
    return slots.attend(module, query, key, value, *args)


def recur(slots: Slots, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
    """Call `slots.recur` as one operator that a `TorchFunctionMode` can intercept."""
    if has_torch_function((hidden_states,)):
        return handle_torch_function(recur, (hidden_states,), slots, layer, hidden_states)
    return slots.recur(layer, hidden_states)


class TracedSlots:
    """Wrapper of the slots of a KV cache whose methods are each traced as one operator."""

    def __init__(self, slots: Slots):
        self.slots = slots

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        return attend(self.slots, module, query, key, value, *args)

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        return recur(self.slots, layer, hidden_states)


class CallRecorder(TorchFunctionMode):
    """Record the torch calls of one run. `named_objects` maps names to inputs, weights and modules."""

    def __init__(self, named_objects: Mapping[str, Any]):
        super().__init__()
        self.calls: list[Call] = []
        self.refs = {id(value): Ref(name) for name, value in reversed(list(named_objects.items()))}
        # The objects are kept alive, because the id of a freed object is reused.
        self.live_objects: list[Any] = list(named_objects.values())

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
            return out  # the call has returned its input, as to(), contiguous() and dropout() may do
        if not isinstance(out, Tensor) and not all(isinstance(item, Tensor) for item in out):
            raise TraceError(f"{_name(func)} returns values other than tensors")
        shape = tuple(out.shape) if isinstance(out, Tensor) else None
        self.calls.append(Call(func, self._replace_with_refs(args), self._replace_with_refs(kwargs), shape))
        self.live_objects += results
        number = len(self.calls) - 1
        if isinstance(out, Tensor):
            self.refs[id(out)] = Ref(number)
        else:
            self.refs.update({id(tensor): Ref(number, item) for item, tensor in enumerate(out)})
        return out

    def ref(self, tensor: Tensor) -> Ref:
        if id(tensor) not in self.refs:
            raise TraceError(f"a tensor of shape {tuple(tensor.shape)} is neither an input nor a weight")
        return self.refs[id(tensor)]

    def _replace_with_refs(self, arguments: Any) -> Any:
        """Replace each tensor and module in `arguments` with a `Ref`."""

        def replace(leaf: Any) -> Any:
            return self.ref(leaf) if isinstance(leaf, Tensor) else self.refs.get(id(leaf), leaf)

        return map_aggregate(arguments, replace)


def trace(hf: nn.Module, inputs: Callable[[int], Mapping[str, Any]], run: Callable[..., Tensor]) -> Graph:
    """Trace `run(**inputs(rows))` into a graph. The names of the inputs must not depend on the batch size `rows`.

    The placeholders of the graph are the inputs and `rows`. Its attributes are names of modules and weights of `hf`.
    """
    recorders, outputs = [], []
    for rows in TRACED_BATCH_SIZES:
        arguments = dict(inputs(rows))
        recorder = CallRecorder(arguments | named_members(hf))
        with torch.inference_mode(False), torch.no_grad(), recorder:
            outputs.append(recorder.ref(run(**arguments)))
        recorders.append(recorder)
    return _GraphMerger(list(arguments)).merge(recorders[0].calls, recorders[1].calls, *outputs)


def named_members(hf: nn.Module) -> dict[str, Any]:
    """Return the modules, weights and buffers to which a graph may refer, by name."""
    return {
        **{name: module for name, module in hf.named_modules() if name},
        **dict(hf.named_parameters(remove_duplicate=False)),
        **dict(hf.named_buffers(remove_duplicate=False)),
    }


def compile_graph(graph: Graph) -> tuple[Callable[..., Tensor], dict[str, str]]:
    """Compile a graph to a function whose first argument has weights and modules as attributes.

    Also return a map from each attribute to the name of the weight or module.
    """
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            name, node.target = str(node.target), f"member{len(names)}"
            names[node.target] = name
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)
    return scope["forward"], names


class _GraphMerger:
    """Merge the recorded calls of two runs into one graph."""

    def __init__(self, inputs: list[str]):
        self.fx = Graph()
        self.nodes: dict[Any, Node] = {name: self.fx.placeholder(name) for name in [*inputs, "rows"]}

    def merge(self, first: list[Call], second: list[Call], output: Ref, second_output: Ref) -> Graph:
        if len(first) != len(second) or output != second_output:
            raise TraceError("the traced operators depend on the batch size, so one graph cannot serve all batch sizes")
        for number, (call, second_call) in enumerate(zip(first, second, strict=True)):
            if call.func != second_call.func:
                raise TraceError(
                    f"an operator is {_name(call.func)} or {_name(second_call.func)}, depending on the batch size"
                )
            args = self._merge_arguments(call.args, second_call.args)
            kwargs = self._merge_arguments(call.kwargs, second_call.kwargs)
            if _name(call.func) == "__get__":  # a property that returns a tensor
                node = self.fx.call_function(getattr, (args[0], call.func.__self__.__name__))
            else:
                node = self.fx.call_function(call.func, args, kwargs)
            node.meta["shape"] = call.shape
            self.nodes[Ref(number)] = node
        self.fx.output(self._node(output))
        return self.fx

    def _node(self, ref: Ref) -> Node:
        if ref not in self.nodes:
            if ref.item is not None:
                self.nodes[ref] = self.fx.call_function(operator.getitem, (self.nodes[Ref(ref.source)], ref.item))
            elif ref.source in self.nodes:
                return self.nodes[ref.source]
            else:
                self.nodes[ref] = self.fx.create_node("get_attr", str(ref.source))
        return self.nodes[ref]

    def _merge_arguments(self, a: Any, b: Any) -> Any:
        if type(a) is not type(b):
            raise TraceError(f"an argument is {a} or {b}, depending on the batch size")
        if isinstance(a, Ref) and a == b:
            return self._node(a)
        if isinstance(a, tuple | list) and len(a) == len(b):
            items = [self._merge_arguments(x, y) for x, y in zip(a, b, strict=True)]
            return items if isinstance(a, list) else type(a)(*items) if isinstance(a, Scores) else tuple(items)
        if isinstance(a, dict) and list(a) == list(b):
            return {key: self._merge_arguments(a[key], b[key]) for key in a}
        if isinstance(a, slice):
            return slice(*(self._merge_arguments(getattr(a, k), getattr(b, k)) for k in ("start", "stop", "step")))
        small, large = TRACED_BATCH_SIZES
        if type(a) is int and a != b and a * large == b * small and not a % small:
            return self.fx.call_function(operator.mul, (self.nodes["rows"], a // small))
        if a != b:
            raise TraceError(f"an argument is {a} or {b}, depending on the batch size")
        return a


def _tensors(value: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    map_aggregate(value, lambda leaf: leaves.append(leaf) if isinstance(leaf, Tensor) else None)
    return leaves


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
