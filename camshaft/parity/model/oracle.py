"""The plain transformers model in float64, one row at a time, and variants of it with one change.

    oracle = Oracle(folder)
    oracle.log_probs(rows)                                   # of the tokens after the first, for each row
    oracle.log_probs(rows, Change("rms_norm_eps", "with rms_norm_eps=1e-05", config={"rms_norm_eps": 1e-5}))

A variant shares the weights of the oracle. If an engine computes the log-probs of a variant, it makes that change.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from camshaft.contracts.engine.oracle import causal_mask, explicit_attention, explicit_model
from camshaft.models.folders import convert_errors, reason
from camshaft.models.loader import load_config, quiet_transformers

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

    cause: str
    detail: str
    """Continuation of the sentence "the log-probs equal those of the model"."""
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Callable[[Weights], Weights] | None = None
    scores: Scores | None = None
    hook: Callable[[nn.Module], list[RemovableHandle]] | None = None


NO_CHANGE = Change("", "")


class Oracle:
    """A causal language model of transformers with the weights of a folder, in float64."""

    def __init__(self, folder: Path, trust_remote_code: bool = False):
        self.folder, self._trusted = folder, trust_remote_code
        self.config = load_config(folder, trust_remote_code, {})
        self._class = AutoModelForCausalLM if trust_remote_code else plain_class(self.config)
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            options = {"trust_remote_code": True} if trust_remote_code else {}
            model = self._class.from_pretrained(
                folder, config=self.config, dtype=torch.float64, experts_implementation="eager", **options
            )
        self.model: Any = explicit_model(model, CHANGED).eval()

    @property
    def weights(self) -> Weights:
        """Parameters and persistent buffers by name; a tied weight under each of its names."""
        return dict(self.model.state_dict())

    @contextlib.contextmanager
    def variant(self, change: Change) -> Iterator[nn.Module]:
        """Build the model with a change of the config, of weights or of modules."""
        model: Any = self.model
        if change.config or change.weights is not None:
            config = type(self.config).from_dict({**self.model.config.to_dict(), **change.config})
            options: dict[str, Any] = {"attn_implementation": self.model.config._attn_implementation}
            with quiet_transformers(), no_init_weights():
                model = type(self.model)._from_config(
                    config, dtype=torch.float64, experts_implementation="eager", **options
                )
            weights = self.weights if change.weights is None else change.weights(self.weights)
            model.load_state_dict(weights, strict=False, assign=True)
        handles = [] if change.hook is None else change.hook(model)
        try:
            yield model.eval()
        finally:
            for handle in handles:
                handle.remove()

    def log_probs(self, rows: Sequence[Tensor], change: Change = NO_CHANGE) -> list[Tensor]:
        """Return the log-probs of the tokens of each row after its first."""
        distributions = self._distributions(rows, change)
        return [each.gather(-1, row[1:, None])[:, 0] for each, row in zip(distributions, rows, strict=True)]

    @torch.no_grad()
    def in_float32(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs of `log_probs`, computed in float32."""
        model = copy.deepcopy(self.model).float()
        logits = [model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1) for row in rows]
        return [each.gather(-1, row[1:, None])[:, 0].double() for each, row in zip(logits, rows, strict=True)]

    def greedy_gaps(self, rows: Sequence[Tensor], count: int) -> list[Tensor]:
        """Return by how much the most likely token exceeds each of the last `count` tokens of a row."""
        return [
            (each.amax(-1) - each.gather(-1, row[1:, None])[:, 0])[-count:]
            for each, row in zip(self._distributions(rows, NO_CHANGE), rows, strict=True)
        ]

    @torch.no_grad()
    def _distributions(self, rows: Sequence[Tensor], change: Change) -> list[Tensor]:
        """Return the log-probs of all tokens after each token of each row but its last."""
        arguments = {} if change.scores is None else {"scores": change.scores}
        problem = f"transformers cannot compute {type(self.model).__name__} in float64"
        with self.variant(change) as model, convert_errors(lambda error: f"{problem}: {reason(error)}"):
            return [
                model(input_ids=row[None], use_cache=False, **arguments).logits[0, :-1].double().log_softmax(-1)
                for row in rows
            ]


def plain_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers for a model type, also if another is registered; None if there is none."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return None if names is None else getattr(transformers, names if isinstance(names, str) else names[0])


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
