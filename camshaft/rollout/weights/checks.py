"""Validate the names, shapes and tied weights of a weight sync.

    expected = ExpectedWeights.from_config(config)      # reads config.json; allocates no memory for weights
    for name, tensor in expected.validate(weights):
        copy(name, tensor)                              # name and shape are valid; the loop ends with no weight missing

If a weight is unknown, missing, sent twice or has the wrong shape, or if tied weights have different values, validation
raises a `RolloutError` that contains the name of the weight. Rollouts validate before they pass a tensor to a library,
because the library would ignore such errors.
"""

import contextlib
import difflib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedModel

from camshaft.config.engine import LoRAConfig
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.folders import convert_model_errors
from camshaft.models.loader import (
    DTYPES,
    experts_option,
    import_external,
    load_config,
    model_folder,
    quiet_transformers,
)
from camshaft.models.lora import adapter_shapes


@dataclass(frozen=True, eq=False)
class ExpectedWeight:
    """A weight that a sync must contain. A tied weight has several names in the model."""

    names: tuple[str, ...]
    meta: Tensor
    """Tensor on the meta device with the expected shape and dtype."""
    is_parameter: bool


@dataclass(frozen=True, eq=False)
class ExpectedWeights:
    """All weights that a sync of one model must contain, keyed by each name under which it may send them."""

    model: str
    weights: Mapping[str, ExpectedWeight]
    call: str = "load_weights"
    """Name of the rollout's method that loads the weights, for error messages."""
    source: str = "engine.named_weights()"
    """Call of the engine that yields all weights, for error messages."""

    @classmethod
    def from_model(cls, hf: PreTrainedModel) -> Self:
        return cls(type(hf).__name__, _weights_of(hf))

    @classmethod
    def from_config(cls, config: RolloutEngineConfig) -> Self:
        """Return the expected weights of the model in `config.model_path`."""
        return cls.from_model(empty_model(config, attention="eager"))

    @classmethod
    def adapter_from_config(cls, config: RolloutEngineConfig, lora: LoRAConfig) -> Self:
        """Return the expected weights of a LoRA adapter for that model, without the base weights."""
        shapes = adapter_shapes(empty_model(config, attention="eager"), lora)
        meta = {name: torch.empty(shape, dtype=DTYPES[config.dtype], device="meta") for name, shape in shapes.items()}
        weights = {name: ExpectedWeight((name,), tensor, True) for name, tensor in meta.items()}
        return cls("the adapter", weights, "load_adapter", "engine.named_weights(adapter_only=True)")

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the model stores the weight, or None for an unknown name."""
        weight = self.weights.get(name)
        return None if weight is None else weight.meta.dtype

    def validate(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight after validating it, and raise an error if a weight is missing at the end.

        A tied weight may be sent under one of its names or under several.
        """
        seen_tensors: dict[str, Tensor | None] = {}
        for name, tensor in weights:
            weight = self._match(name, tensor)
            if name in seen_tensors:
                raise RolloutError(f"{self.call}: weight '{name}' was sent twice; send each weight once")
            _compare_with_twin(weight, name, tensor, seen_tensors)
            seen_tensors[name] = tensor.detach() if len(weight.names) > 1 else None
            yield name, tensor
        missing_names = [
            w.names[0] for w in dict.fromkeys(self.weights.values()) if not seen_tensors.keys() & set(w.names)
        ]
        if missing_names:
            suffix = f" and {len(missing_names) - 8} more" if len(missing_names) > 8 else ""
            raise RolloutError(
                f"{self.call}: {len(missing_names)} weights are missing: {', '.join(missing_names[:8])}{suffix}; "
                f"send all weights of {self.source} without renaming them"
            )

    @property
    def canonical_names(self) -> dict[str, str]:
        """Map from each name to the first of its tied names, which is that of the embedding."""
        return {name: weight.names[0] for name, weight in self.weights.items()}

    def _match(self, name: str, tensor: Tensor) -> ExpectedWeight:
        weight = self.weights.get(name)
        if weight is None:
            close = difflib.get_close_matches(name, self.weights, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise RolloutError(f"{self.call}: {self.model} has no weight '{name}'{hint}")
        if tensor.shape != weight.meta.shape:
            raise RolloutError(
                f"{self.call}: weight '{name}' has shape {tuple(tensor.shape)}, but the model expects "
                f"{tuple(weight.meta.shape)}; build the engine and the rollout from the same config"
            )
        return weight


def drop_tied_duplicates(
    weights: Iterable[tuple[str, Tensor]], canonical_names: Mapping[str, str], sent_names: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tied weight once, under its canonical name. Libraries silently skip its other names.

    `sent_names` contains the names that earlier calls of the same sync have yielded. This function adds to it.
    """
    for name, tensor in weights:
        canonical = canonical_names[name]
        if canonical not in sent_names:
            sent_names.add(canonical)
            yield canonical, tensor


def split_stacked(
    weights: Iterable[tuple[str, Tensor]], layout: Callable[[str, Tensor], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the layout of files (`models.loader.file_layout`), from which vLLM loads all models.

    Files contain one tensor per expert. vLLM loads stacked experts for a few models only.
    """
    for name, tensor in weights:
        yield from layout(name, tensor).items()


def _compare_with_twin(
    weight: ExpectedWeight, name: str, tensor: Tensor, seen_tensors: dict[str, Tensor | None]
) -> None:
    """Raise an error if a tied weight was sent under another name with different values."""
    twin = next((other for other in weight.names if other in seen_tensors), None)
    twin_tensor = None if twin is None else seen_tensors[twin]
    if twin_tensor is None or tensor.data_ptr() == twin_tensor.data_ptr():
        return
    if not torch.equal(tensor.detach().to(twin_tensor), twin_tensor):
        raise RolloutError(
            f"load_weights: '{twin}' and '{name}' are tied in this model but were sent with different values; set "
            "tie_word_embeddings=False in override_config if the engine trains them separately"
        )


def empty_model(config: RolloutEngineConfig, attention: str) -> PreTrainedModel:
    """Build the configured model in eval mode, with parameters on the meta device and buffers on the CPU."""
    import_external(config.external_lib)
    folder = model_folder(config.model_path)
    hf_config = load_config(folder, config.trust_remote_code, config.override_config)
    errors = convert_model_errors(folder, hf_config.model_type, "causal_lm")
    with quiet_transformers(), errors, _parameters_on_meta():
        return AutoModelForCausalLM.from_config(
            hf_config,
            dtype=DTYPES[config.dtype],
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            **experts_option(DTYPES[config.dtype]),
        ).eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move the parameters of modules that this thread builds to the meta device.

    `torch.device("meta")` would also drop the values of buffers such as rotary frequencies, which no checkpoint
    contains.
    """
    builder = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != builder:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook: Any = to_meta  # torch's annotation does not allow a hook to return another parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _weights_of(hf: PreTrainedModel) -> dict[str, ExpectedWeight]:
    """Map every weight name to its `ExpectedWeight`. The names of a tied weight share one object."""
    expected: dict[str, ExpectedWeight] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, tied_names in names.items():
        meta = _with_model_dtype(hf, tied_names[0], parameter.data)
        expected.update(dict.fromkeys(tied_names, ExpectedWeight(tuple(tied_names), meta, True)))
    for name, tensor in hf.state_dict().items():
        if name not in expected:
            expected[name] = ExpectedWeight((name,), _with_model_dtype(hf, name, tensor.to("meta")), False)
    return expected


def _with_model_dtype(hf: PreTrainedModel, name: str, meta: Tensor) -> Tensor:
    """Convert `meta` to float32 if the architecture requires it. transformers does so only in `from_pretrained`."""
    float32_modules = hf._keep_in_fp32_modules_strict or ()
    if meta.dtype == torch.bfloat16 and any(re.search(rf"(^|\.){part}(\.|$)", name) for part in float32_modules):
        return meta.float()
    return meta
