"""The plain transformers model in float64, one row at a time, and variants of it with one change.

    oracle = Oracle(model)
    oracle.log_probs(rows)                                   # of the tokens after the first, for each row
    oracle.log_probs(rows, Change("norm eps", "with rms_norm_eps=1e-05", config={"rms_norm_eps": 1e-5}))

A variant shares the weights of the oracle. If an engine computes the log-probs of a variant, it makes that change.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.initialization import no_init_weights
from transformers.masking_utils import sdpa_mask

from camshaft.contracts.engine.oracle import causal_mask, explicit_attention, explicit_model
from camshaft.models.loader import quiet_transformers

CHANGED = "changed"
"""Name of the attention implementation `changed_attention`."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """Change of the attention scores and of the causal mask."""

    factor: float = 1.0
    diagonal: int = 0
    """Number of later tokens that a token attends to. With -1, it does not attend to itself."""
    swap: bool = False
    """Exchange queries and keys."""
    sinks: bool = True


@dataclass(frozen=True)
class Change:
    """One difference from the oracle."""

    cause: str = ""
    detail: str = ""
    """Continuation of the sentence "the log-probs equal those of the model"."""
    config: Mapping[str, Any] = field(default_factory=dict)
    weight: Callable[[Weights, str], Tensor] | None = None
    """Returns the changed weight of a name."""
    scores: Scores | None = None
    module: str = ""
    """Last part of the names of the modules whose outputs change."""
    output: Callable[[Tensor, Tensor], Tensor] = lambda given, out: out
    """Returns the changed output of these modules, from their input and output."""


class Oracle:
    """A causal language model of transformers in float64."""

    def __init__(self, model: Any):
        self.model = explicit_model(model, CHANGED).eval()

    @property
    def values(self) -> dict[str, Any]:
        """Values of the config of the language model."""
        return self.model.config.get_text_config().to_dict()

    @property
    def weights(self) -> Weights:
        """Parameters and persistent buffers by name; a tied weight under each of its names."""
        return dict(self.model.state_dict())

    @contextlib.contextmanager
    def variant(self, change: Change) -> Iterator[nn.Module]:
        """Build the model with a change of the config, of weights or of modules."""
        model: Any = self.model
        if change.config or change.weight is not None:
            config = type(model.config).from_dict({**model.config.to_dict(), **change.config})
            options: dict[str, Any] = {"attn_implementation": model.config._attn_implementation}
            with quiet_transformers(), no_init_weights():
                model = type(model)._from_config(config, dtype=torch.float64, experts_implementation="eager", **options)
            weights = self.weights
            if change.weight is not None:
                weights = {name: change.weight(weights, name) for name in weights}
            model.load_state_dict(weights, strict=False, assign=True)
        changed = [m for n, m in model.named_modules() if change.module and n.rpartition(".")[2] == change.module]
        handles = [m.register_forward_hook(lambda _, given, out: change.output(given[0], out)) for m in changed]
        try:
            yield model.eval()
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def log_probs(self, rows: Sequence[Tensor], change: Change | None = None) -> list[Tensor]:
        """Return the log-probs of the tokens of each row after its first."""
        change = change or Change()
        arguments = {} if change.scores is None else {"scores": change.scores}
        with self.variant(change) as model:
            logits = [model(input_ids=row[None], use_cache=False, **arguments).logits[0, :-1].double() for row in rows]
        return [each.log_softmax(-1).gather(-1, row[1:, None])[:, 0] for each, row in zip(logits, rows, strict=True)]


def changed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Compute `explicit_attention` with the changes of the argument `scores`, if the model call has it."""
    change: Scores = arguments.pop("scores", None) or Scores()
    if change.swap:
        query, key = key, query
    if change.factor != 1:
        scaling = arguments.get("scaling")
        arguments["scaling"] = change.factor * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if change.diagonal:
        window = arguments.get("sliding_window")
        attention_mask = causal_mask(query.shape[2], window, query.device, change.diagonal)
    if not change.sinks:
        arguments["s_aux"] = None
    return explicit_attention(module, query, key, value, attention_mask, **arguments)


AttentionInterface.register(CHANGED, changed_attention)
AttentionMaskInterface.register(CHANGED, sdpa_mask)
