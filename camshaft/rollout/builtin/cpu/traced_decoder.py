"""One token for each live row: the model's forward as a flat list of operators, or the model's own.

    decoder = Decoder(hf)
    with decoder.ready(num_rows=64, num_steps=128) as forward:
        logits = forward(tokens, positions, TokenStep(pool, positions, length))     # (B, V)

Half of a small model's step is the Python of its modules and what they spell out in many small operators. So, on a CPU
in float32, the first call that is long enough writes down what the forward asks of torch (`tape.py`), shortens it
(`rewrites.py`), and compares it with the model's own forward on other tokens and other numbers of rows. A model whose
forward cannot be written down, or that does not agree, runs as it is: `decoder.reason` says why. So does one with
hooks. The list holds no weights: each call binds those that the model has then.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from transformers import PreTrainedModel

from camshaft.models.attention import Slots, no_mask
from camshaft.rollout.builtin.cpu.graph_fusions import shorten
from camshaft.rollout.builtin.cpu.linears import (
    MIN_ROWS,
    MIN_STEPS,
    ROW_THRESHOLDS,
    PackableLinear,
    packed_linears,
    product_of,
)
from camshaft.rollout.builtin.cpu.tracer import NotWritten, SeenSlots, things_of, written

Forward = Callable[[Tensor, Tensor, Slots], Tensor]
"""(B,) tokens, (B,) positions and where keys and values are -> (B, V) logits."""

COMPARED = (1, 2, 7)
"""Numbers of rows on which the list is compared with the model's own forward."""

TOLERANCE = 1e-4
"""How far logits may be apart, as a share of the largest one."""


logger = logging.getLogger(__name__)


class Decoder:
    """See the map above."""

    def __init__(self, hf: PreTrainedModel):
        self.hf = hf
        self.reason: str | None = None
        self._list: _List | None = None

    @contextmanager
    def ready(self, num_rows: int, num_steps: int) -> Iterator[Forward]:
        """Inside, a forward for the weights as they are now; what is copied of them is freed behind."""
        flat = num_rows >= MIN_ROWS and num_steps >= MIN_STEPS and not hooked(self.hf)
        if flat:
            self._write_once()
        with packed_linears(self.hf, num_rows, num_steps):
            yield self._list.bound(self.hf) if flat and self._list is not None else self.own

    def own(self, tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        """The model's own forward."""
        kwargs: dict[str, Any] = {"attention_mask": no_mask(tokens.device), "slots": slots, "use_cache": False}
        return self.hf(input_ids=tokens[:, None], position_ids=positions[:, None], **kwargs).logits[:, -1]

    def _write_once(self) -> None:
        if self._list is not None or self.reason is not None:
            return
        if any(t.device.type != "cpu" or t.dtype != torch.float32 for t in self.hf.parameters()):
            self.reason = "lists are for float32 on a CPU"
            return
        try:
            self._list = self._written()
        except NotWritten as error:
            self.reason = str(error)
            logger.info("%s generates with its own forward: %s", type(self.hf).__name__, error)

    def _written(self) -> _List | None:
        """The list, after it has agreed with the model; None where weights that are no numbers tell nothing."""
        names = ("tokens", "positions", "mask", "slots")

        def inputs(rows: int) -> dict[str, Any]:
            return dict(zip(names, (*_some(rows), no_mask("cpu"), _Alone()), strict=True))

        def run(tokens: Tensor, positions: Tensor, mask: Tensor, slots: Slots) -> Tensor:
            kwargs: dict[str, Any] = {"attention_mask": mask, "slots": SeenSlots(slots), "use_cache": False}
            return self.hf(input_ids=tokens[:, None], position_ids=positions[:, None], **kwargs).logits[:, -1]

        graph = written(self.hf, inputs, run)
        shorten(graph)
        found = _List(graph, self.hf)
        with torch.inference_mode():
            forward = found.bound(self.hf)
            for rows in COMPARED:
                wanted, given = (f(*_some(rows), _Alone()) for f in (self.own, forward))
                if not wanted.isfinite().all():
                    return None
                apart, largest = float((wanted - given).abs().max()), float(wanted.abs().max())
                if wanted.shape != given.shape or not apart <= TOLERANCE * largest:
                    raise NotWritten(f"logits of the list are {apart:.1e} from those of the model for {rows} rows")
        return found


def hooked(hf: nn.Module) -> bool:
    """Whether somebody wants to see the model's forward run."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in hf.modules())


class _List:
    """A graph as a function of Python; what it takes from the model is looked up when it is bound."""

    def __init__(self, graph: Graph, hf: nn.Module):
        self.things: dict[str, str] = {}
        self.linears: dict[str, str] = {}
        held = things_of(hf)
        layers = {
            (id(m.weight), id(m.bias)): name for name, m in hf.named_modules() if type(m) in (nn.Linear, PackableLinear)
        }
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is F.linear and not node.kwargs:
                weights = (
                    held.get(str(arg.target)) if isinstance(arg, Node) else arg for arg in (*node.args, None)[1:3]
                )
                layer = layers.get(tuple(map(id, weights)))  # pyright: ignore[reportArgumentType]
                if layer is not None:
                    node.op, node.target, node.args = "call_module", f"linear{len(self.linears)}", node.args[:1]
                    self.linears[node.target] = layer
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        for node in graph.nodes:
            if node.op == "get_attr":
                name, node.target = node.target, f"thing{len(self.things)}"
                self.things[node.target] = name
        code = graph.python_code("self")
        scope = dict(code.globals)
        exec(code.src, scope)
        self.function: Any = scope["forward"]

    def bound(self, hf: nn.Module) -> Forward:
        """With the weights that `hf` has now, and the copies of them."""
        held, mask = things_of(hf), no_mask("cpu")
        common = {short: held[name] for short, name in self.things.items()}
        layers: dict[str, Any] = {short: hf.get_submodule(name) for short, name in self.linears.items()}
        taken = [
            SimpleNamespace(**common, **{short: product_of(layer, rows) for short, layer in layers.items()})
            for rows in ROW_THRESHOLDS
        ]

        def forward(tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
            rows = len(tokens)
            thing = taken[bisect.bisect_right(ROW_THRESHOLDS, rows) - 1]
            return self.function(thing, tokens, positions, mask, slots, rows)

        return forward


class _Alone:
    """Slots that hold nothing: each token sees itself, by as much as its query and its key agree."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        share = (query * key.repeat_interleave(groups, 1)).sum(-1, keepdim=True).mul(scaling).sigmoid()
        return (share * value.repeat_interleave(groups, 1)).transpose(1, 2)


def _some(rows: int) -> tuple[Tensor, Tensor]:
    """Different tokens and positions."""
    return torch.arange(rows) + 1, torch.arange(rows).flip(0)
