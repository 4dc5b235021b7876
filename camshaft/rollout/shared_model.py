"""A transformers model that shares its weights with the training engine.

    model = SharedModel(config, attention=PACKED)
    model.load(engine.named_weights())
    model.require_model().forward(...)
    model.sleep()                          # releases the weights

The model is built from the config of its folder, without weights. A tensor of the right dtype on the right device
becomes the parameter itself, so an optimizer's in-place update is visible without another `load`; any other tensor is
copied. The generators that run a transformers model (`builtin`, `hf`) use it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.models.loader import has_tokenizer, load_tokenizer, model_folder
from camshaft.rollout.base import check_can_generate, check_can_load
from camshaft.rollout.weights.checks import ExpectedWeight, ExpectedWeights, empty_model


class SharedModel:
    """The model, its weights once loaded, and the tokens that end a sequence."""

    def __init__(self, config: RolloutEngineConfig, attention: str):
        if config.engine_kwargs:
            raise RolloutError(
                f"the 'torch' and 'hf' rollouts have no engine_kwargs, got {dict(config.engine_kwargs)}; remove them"
            )
        self.device = torch.device(config.device)
        self.hf: PreTrainedModel = empty_model(config, attention)
        for buffer in self.hf.buffers():
            buffer.data = buffer.data.to(self.device)
        self._folder, self._trust = model_folder(config.model_path), config.trust_remote_code
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.stop_ids = stop_ids_of(self._folder, self.hf.config, self._trust)
        self.expected = ExpectedWeights.of_model(self.hf)
        self._loaded_names: set[str] | None = None
        self._asleep = False

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding; token ids are below this number."""
        embeddings: Any = self.hf.get_input_embeddings()
        return embeddings.weight.shape[0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model folder, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(str(self._folder), self._trust)
        return self._tokenizer

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights. After an error the model has no weights."""
        check_can_load(self._asleep)
        self._loaded_names = None
        names: set[str] = set()
        for name, tensor in self.expected.validate(weights):
            weight = self.expected.weights[name]
            if not names & set(weight.names):
                _set_tensor(self.hf, weight, tensor.detach().to(self.device, weight.meta.dtype))
            names.add(name)
        self._loaded_names = names

    def digests(self) -> Mapping[str, int]:
        """Return the digests of the model's present weights, by the names passed to `load`."""
        tensors = self.require_model().state_dict()
        assert self._loaded_names is not None
        return {name: digest(tensors[name]) for name in self._loaded_names}

    def require_model(self) -> PreTrainedModel:
        """Return the model; raise `RolloutError` if the rollout is asleep or has no weights."""
        check_can_generate(self._asleep, self._loaded_names is not None)
        return self.hf

    def sleep(self) -> None:
        """Release the weights; copies are freed."""
        self._asleep, self._loaded_names = True, None
        for weight in self.expected.weights.values():
            _set_tensor(self.hf, weight, weight.meta)

    def wake_up(self) -> None:
        """Permit `load` again; no effect on a model that is awake."""
        self._asleep = False


def _set_tensor(hf: nn.Module, weight: ExpectedWeight, tensor: Tensor) -> None:
    """Register `tensor` under all names of `weight`, without a copy."""
    registered = nn.Parameter(tensor, requires_grad=False) if weight.is_parameter else tensor
    for name in weight.names:
        owner, _, leaf = name.rpartition(".")
        if isinstance(registered, nn.Parameter):
            hf.get_submodule(owner).register_parameter(leaf, registered)
        else:
            hf.get_submodule(owner).register_buffer(leaf, registered)


def stop_ids_of(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> tuple[int, ...]:
    """All that the folder calls an end of sequence: its generation config, its config and its tokenizer."""
    sources = [config.eos_token_id, config.get_text_config().eos_token_id]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    if has_tokenizer(folder):
        sources.append(load_tokenizer(str(folder), trust_remote_code).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update([] if source is None else [source] if isinstance(source, int) else source)
    return tuple(sorted(ids))
