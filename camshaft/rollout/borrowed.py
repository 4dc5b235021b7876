"""A transformers model whose weights belong to somebody else.

    model = BorrowedModel(config, attention=PACKED)
    model.load(engine.named_weights())
    model.ready().forward(...)
    model.sleep()                          # lets go of the weights

The model is built from the config of its folder, without weights. Those that come are adopted: a tensor of the
right dtype on the right device becomes the parameter itself, so that an optimizer's update in place is seen
without another `load`; any other is copied. Used by the generators that run a transformers model.
"""

import contextlib
import difflib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.models.loader import (
    DTYPES,
    import_external,
    load_config,
    load_tokenizer,
    model_folder,
    quiet_transformers,
)


@dataclass(frozen=True, eq=False)
class _Weight:
    """One weight, and all places of the model that hold it (several if it is tied)."""

    names: tuple[str, ...]
    empty: Tensor
    """Shape and dtype, on the meta device."""
    is_parameter: bool

    def put(self, hf: nn.Module, tensor: Tensor) -> None:
        """Let all places hold `tensor` itself."""
        held = nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor
        for name in self.names:
            owner, _, leaf = name.rpartition(".")
            if isinstance(held, nn.Parameter):
                hf.get_submodule(owner).register_parameter(leaf, held)
            else:
                hf.get_submodule(owner).register_buffer(leaf, held)


class BorrowedModel:
    """The model, its weights if it has any, and the tokens that end a sequence."""

    def __init__(self, config: RolloutEngineConfig, attention: str):
        if config.engine_kwargs:
            raise RolloutError(f"the 'torch' and 'hf' rollouts take no engine_kwargs, got {dict(config.engine_kwargs)}")
        import_external(config.external_lib)
        folder = model_folder(config.model_path)
        hf_config = load_config(folder, config.trust_remote_code, config.override_config)
        self.device = torch.device(config.device)
        with quiet_transformers(), _parameters_on_meta():
            self.hf: PreTrainedModel = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=DTYPES[config.dtype],
                attn_implementation=attention,
                trust_remote_code=config.trust_remote_code,
            ).eval()
        for buffer in self.hf.buffers():
            buffer.data = buffer.data.to(self.device)
        self.stop_ids = _stop_ids(folder, hf_config, config.trust_remote_code)
        self._weights = _weights_of(self.hf)
        self._loaded = False
        self._asleep = False

    @property
    def num_embeddings(self) -> int:
        """Token ids are below this number."""
        embeddings: Any = self.hf.get_input_embeddings()
        return embeddings.weight.shape[0]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Adopt all weights; until the last one has come without an error, the model has none."""
        if self._asleep:
            raise RolloutError("the rollout sleeps: call wake_up() before load_weights()")
        self._loaded = False
        came: dict[str, Tensor] = {}
        for name, tensor in weights:
            self._adopt(name, tensor, came)
        missing = [w.names[0] for w in dict.fromkeys(self._weights.values()) if not came.keys() & set(w.names)]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise RolloutError(
                f"load_weights: {len(missing)} weights did not come: {', '.join(missing[:8])}{more}; "
                "send all of engine.named_weights(), each under its transformers name"
            )
        self._loaded = True

    def ready(self) -> PreTrainedModel:
        """The model, if it can generate."""
        if self._asleep:
            raise RolloutError("the rollout sleeps: call wake_up() and load_weights() before generate_sequences()")
        if not self._loaded:
            raise RolloutError(
                "the rollout has no weights: call load_weights(engine.named_weights()) before generate_sequences(), "
                "once at the start and again after each sleep()"
            )
        return self.hf

    def sleep(self) -> None:
        """Let go of the weights; what was copied is freed."""
        self._asleep, self._loaded = True, False
        for weight in self._weights.values():
            weight.put(self.hf, weight.empty)

    def wake_up(self) -> None:
        """Be ready to take weights; nothing happens to a model that is awake."""
        self._asleep = False

    def _adopt(self, name: str, tensor: Tensor, came: dict[str, Tensor]) -> None:
        weight = self._weights.get(name)
        if weight is None:
            close = difflib.get_close_matches(name, self._weights, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise RolloutError(f"load_weights: {type(self.hf).__name__} has no weight '{name}'{hint}")
        if tensor.shape != weight.empty.shape:
            raise RolloutError(
                f"load_weights: '{name}' came with shape {tuple(tensor.shape)}, "
                f"but the model wants {tuple(weight.empty.shape)}; are engine and rollout built from one config?"
            )
        if name in came:
            raise RolloutError(f"load_weights: '{name}' came twice; send each weight once")
        tensor = tensor.detach().to(self.device, weight.empty.dtype)
        twin = next((other for other in weight.names if other in came), None)
        came[name] = tensor
        if twin is None:
            weight.put(self.hf, tensor)
        elif tensor.data_ptr() != came[twin].data_ptr() and not torch.equal(tensor, came[twin]):
            raise RolloutError(
                f"load_weights: '{twin}' and '{name}' are one weight in this model, but came with different values; "
                "set tie_word_embeddings=False in override_config if the engine trains them apart"
            )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside, by this thread, have parameters without storage; buffers are real, as computed.

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


def _weights_of(hf: PreTrainedModel) -> dict[str, _Weight]:
    """Every name under which a weight may come; names of one tied weight lead to the same entry."""
    found: dict[str, _Weight] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(hf.named_parameters(remove_duplicate=False))
    for shared in names.values():
        weight = _Weight(tuple(shared), parameters[shared[0]].data, True)
        found.update(dict.fromkeys(shared, weight))
    for name, tensor in hf.state_dict().items():
        if name not in found:
            found[name] = _Weight((name,), tensor.to("meta"), False)
    return found


def _stop_ids(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> tuple[int, ...]:
    """All that the folder calls an end of sequence: its generation config, its config and its tokenizer."""
    sources = [config.eos_token_id, config.get_text_config().eos_token_id]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
        sources.append(load_tokenizer(str(folder), trust_remote_code).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return tuple(sorted(ids))
