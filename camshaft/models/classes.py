"""Classes of transformers that build and load a model with each head, also where transformers has none.

    cls = model_class(config, "value")                          # AutoModelForTokenClassification, or a class built here
    hf = cls.from_pretrained(folder, config=config)

A class that is built here consists of the decoder of the causal language model and a linear layer. Its forward pass and
the name of the layer (`score`) are those that most families have in transformers.
"""

from functools import cache
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from camshaft.config.engine import Head

AUTO_CLASSES: dict[Head, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
"""Auto class of `transformers` for each head."""
GENERIC: dict[Head, Any] = {"value": GenericForTokenClassification, "reward": GenericForSequenceClassification}
"""Forward pass of the classes of most families."""
DECODERS = {"Llama4ForCausalLM": "model"}
"""Name of the decoder in classes whose `base_model_prefix` is not its name."""


def model_class(config: PreTrainedConfig, head: Head) -> Any:
    """Return a class with `from_config` and `from_pretrained` for models of this config.

    Both accept the arguments of an auto class. Code of the model's folder is loaded only with `trust_remote_code`.
    """
    auto = AUTO_CLASSES[head]
    remote_classes: dict[str, str] = getattr(config, "auto_map", None) or {}
    if head == "causal_lm" or auto.__name__ in remote_classes or type(config) in auto._model_mapping:
        return auto
    if type(config) in AutoModelForCausalLM._model_mapping:
        return scalar_class(AutoModelForCausalLM._model_mapping[type(config)], head)
    if AutoModelForCausalLM.__name__ in remote_classes:  # `load_config` has loaded the folder's code
        reference = remote_classes[AutoModelForCausalLM.__name__]
        return scalar_class(get_class_from_dynamic_module(reference, str(config.name_or_path)), head)
    return auto  # its error lists the supported configs


def decoder_name(cls: type[PreTrainedModel]) -> str:
    """Return the name of the decoder in models of a class."""
    return DECODERS.get(cls.__name__, cls.base_model_prefix)


@cache
def scalar_class(causal: type[PreTrainedModel], head: Head) -> Any:
    """Build a class with the decoder of `causal` and a linear layer with one output."""
    # The class of the family that initializes weights and names its layers, without a forward pass.
    base: Any = next(parent for parent in causal.__mro__ if getattr(parent, "forward", None) is nn.Module.forward)

    class ScalarModel(GENERIC[head], base):
        base_model_prefix = decoder_name(causal)

        def __init__(self, config: Any):
            base.__init__(self, config)
            self.num_labels = config.num_labels
            setattr(self, self.base_model_prefix, getattr(causal(config), self.base_model_prefix))
            self.dropout = nn.Identity()
            self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=head == "value")
            self.post_init()

        @classmethod
        def from_config(cls, config: PreTrainedConfig, trust_remote_code: bool = False, **kwargs: Any) -> Any:
            return cls._from_config(config, **kwargs)

    ScalarModel.__module__ = (
        base.__module__
    )  # or transformers initializes it as code of a model folder, without buffers
    suffix = AUTO_CLASSES[head].__name__.removeprefix("AutoModel")
    ScalarModel.__name__ = ScalarModel.__qualname__ = base.__name__.removesuffix("PreTrainedModel") + suffix
    return ScalarModel
