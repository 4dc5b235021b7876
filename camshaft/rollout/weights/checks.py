"""What weights have to arrive at a generator, and whether they do.

    expected = ExpectedWeights.of_folder(config)          # from config.json, without storage; or adapter_of_folder
    for name, tensor in expected.validate(weights):
        copy(name, tensor)                         # all that comes out fits, and all came when the loop has ended

A weight that is unknown, misshapen, missing, sent twice, or tied to another that came with other values is a
`RolloutError` that names it. Generators check here before they hand a tensor to a library that would not say.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedModel

from camshaft.config.engine import LoRAConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import DTYPES, import_external, load_config, model_folder, quiet_transformers
from camshaft.models.lora import adapter_shapes


@dataclass(frozen=True, eq=False)
class ExpectedWeight:
    """One weight, and all places of the model that hold it (several if it is tied)."""

    names: tuple[str, ...]
    meta: Tensor
    """Shape and dtype, on the meta device."""
    is_parameter: bool


@dataclass(frozen=True, eq=False)
class ExpectedWeights:
    """The weights of one model, by every name under which each may come."""

    model: str
    weights: Mapping[str, ExpectedWeight]
    call: str = "load_weights"
    """What they are given to, and the engine's call that gives all of them; for messages."""
    source: str = "engine.named_weights()"

    @classmethod
    def of_model(cls, hf: PreTrainedModel) -> ExpectedWeights:
        return cls(type(hf).__name__, _weights_of(hf))

    @classmethod
    def of_folder(cls, config: RolloutEngineConfig) -> ExpectedWeights:
        """Those of the model in `config.model_path`."""
        return cls.of_model(empty_model(config, attention="eager"))

    @classmethod
    def adapter_of_folder(cls, config: RolloutEngineConfig, lora: LoRAConfig) -> ExpectedWeights:
        """Those of an adapter by itself, beside that model."""
        shapes = adapter_shapes(empty_model(config, attention="eager"), lora)
        empty = {name: torch.empty(shape, dtype=DTYPES[config.dtype], device="meta") for name, shape in shapes.items()}
        weights = {name: ExpectedWeight((name,), tensor, True) for name, tensor in empty.items()}
        return cls("the adapter", weights, "load_adapter", "engine.named_weights(adapter_only=True)")

    def dtype_of(self, name: str) -> torch.dtype | None:
        """What the model computes with, for the parameters `config.dtype`; None for a name it does not know."""
        weight = self.weights.get(name)
        return None if weight is None else weight.meta.dtype

    def validate(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass on what fits. A tied weight may come under one of its names or under all."""
        came: dict[str, Tensor | None] = {}
        for name, tensor in weights:
            weight = self._fitting(name, tensor)
            if name in came:
                raise RolloutError(f"{self.call}: '{name}' came twice; send each weight once")
            _compare_with_twin(weight, name, tensor, came)
            came[name] = tensor.detach() if len(weight.names) > 1 else None
            yield name, tensor
        missing = [w.names[0] for w in dict.fromkeys(self.weights.values()) if not came.keys() & set(w.names)]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise RolloutError(
                f"{self.call}: {len(missing)} weights did not come: {', '.join(missing[:8])}{more}; "
                f"send all of {self.source}, each under its own name there"
            )

    @property
    def canonical_names(self) -> dict[str, str]:
        """Each name, and the one of its tied names that comes first, the embedding's."""
        return {name: weight.names[0] for name, weight in self.weights.items()}

    def _fitting(self, name: str, tensor: Tensor) -> ExpectedWeight:
        weight = self.weights.get(name)
        if weight is None:
            close = difflib.get_close_matches(name, self.weights, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise RolloutError(f"{self.call}: {self.model} has no weight '{name}'{hint}")
        if tensor.shape != weight.meta.shape:
            raise RolloutError(
                f"{self.call}: '{name}' came with shape {tuple(tensor.shape)}, "
                f"but the model wants {tuple(weight.meta.shape)}; are engine and rollout built from one config?"
            )
        return weight


def drop_tied_duplicates(
    weights: Iterable[tuple[str, Tensor]], canonical_names: Mapping[str, str], passed: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """A tied weight under the first of its names alone: libraries skip it elsewhere without a word.

    `passed` are the names that went before, and grows.
    """
    for name, tensor in weights:
        own = canonical_names[name]
        if own not in passed:
            passed.add(own)
            yield own, tensor


def _compare_with_twin(weight: ExpectedWeight, name: str, tensor: Tensor, came: dict[str, Tensor | None]) -> None:
    """Refuse a tied weight that came before under another name with other values."""
    twin = next((other for other in weight.names if other in came), None)
    first = None if twin is None else came[twin]
    if first is None or tensor.data_ptr() == first.data_ptr():
        return
    if not torch.equal(tensor.detach().to(first), first):
        raise RolloutError(
            f"load_weights: '{twin}' and '{name}' are one weight in this model, but came with different values; "
            "set tie_word_embeddings=False in override_config if the engine trains them apart"
        )


def empty_model(config: RolloutEngineConfig, attention: str) -> PreTrainedModel:
    """The model of the folder in eval mode, parameters without storage; buffers are real, as computed, on the CPU."""
    import_external(config.external_lib)
    hf_config = load_config(model_folder(config.model_path), config.trust_remote_code, config.override_config)
    with quiet_transformers(), _parameters_on_meta():
        return AutoModelForCausalLM.from_config(
            hf_config,
            dtype=DTYPES[config.dtype],
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        ).eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside, by this thread, have parameters without storage.

    Building on the meta device as a whole would leave rotary frequencies and the like without values, and they
    are in nobody's weights.
    """
    builder = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != builder:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook: Any = to_meta  # torch's annotation forgets that a hook may return another parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _weights_of(hf: PreTrainedModel) -> dict[str, ExpectedWeight]:
    """Names of one tied weight lead to the same entry."""
    found: dict[str, ExpectedWeight] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(hf.named_parameters(remove_duplicate=False))
    for shared in names.values():
        weight = ExpectedWeight(tuple(shared), _as_kept(hf, shared[0], parameters[shared[0]].data), True)
        found.update(dict.fromkeys(shared, weight))
    for name, tensor in hf.state_dict().items():
        if name not in found:
            found[name] = ExpectedWeight((name,), _as_kept(hf, name, tensor.to("meta")), False)
    return found


def _as_kept(hf: PreTrainedModel, name: str, empty: Tensor) -> Tensor:
    """In float32 where the family does not bear less; transformers heeds that only where it reads a folder."""
    kept = hf._keep_in_fp32_modules_strict or ()
    if empty.dtype == torch.bfloat16 and any(re.search(rf"(^|\.){part}(\.|$)", name) for part in kept):
        return empty.float()
    return empty
