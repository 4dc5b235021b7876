"""Converts a model config of transformers to a config of torchtitan, and names weights as transformers does.

    family = FAMILIES[hf.config.model_type]
    config = family.decoder_config(hf.config, "causal_lm", True)
    family.titan_name("model.norm.weight", config)               # "norm.weight"

The weights of both models have equal shapes and equal values: the three projections of attention are separate
matrices, and the rotary embedding has the layout of transformers (`layers.py`). Only names differ.
"""

# pyright: reportMissingImports=false
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torchtitan.models.common import Embedding, Linear, RMSNorm, TransformerBlock
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.sharding import ShardingConfig
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from camshaft.engine.torchtitan.layers import OutputHead, PackedAttention, RotaryEmbedding
from camshaft.errors import EngineError
from camshaft.models.packed import SCALAR_HEADS, Head

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the length of the rows."""


class PackedDecoder(Decoder):
    """A decoder that returns the last hidden states, and whose tied weights stay tied under tensor parallelism.

    A pipeline stage has the layers of its stage only. `tok_embeddings` is None except on the first stage, and `norm`
    and `lm_head` are None except on the last one.
    """

    _skip_lm_head = True

    def untie_stages(self) -> None:
        """Treat tied weights that are on different pipeline stages as separate parameters."""
        if self.tok_embeddings is None or self.lm_head is None:
            self.enable_weight_tying = False

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)  # replaces each parameter separately
        self.tie_weights()

    def skip_padding(self, token: int | None, tensor_rank: int, tensor_size: int) -> None:
        """Compute no gradient of the embedding of the padding token, as transformers does, if there is one.

        Tensor-parallel ranks hold equal ranges of the vocabulary.
        """
        if self.tok_embeddings is None:
            return
        rows = self.tok_embeddings.num_embeddings // tensor_size
        local = -1 if token is None else token - tensor_rank * rows
        self.tok_embeddings.padding_idx = local if 0 <= local < rows else None

    def tie_weights(self) -> None:
        """Let the embedding and the output layer share one parameter, if the model ties them."""
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight


class LlamaDecoder(PackedDecoder, Llama3Model):
    """Decoder of llama and qwen2 models."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass


class QwenDecoder(PackedDecoder, Qwen3Model):
    """Decoder of qwen3 models."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass


@dataclass(frozen=True)
class Family:
    """Model definition of torchtitan for a model type of transformers."""

    decoder: type[PackedDecoder]
    block: type[TransformerBlock]
    adapter: Any
    parallelize: Callable[..., Any]
    """Applies tensor parallelism, activation checkpointing and FSDP to a decoder."""
    set_sharding: Callable[..., None]
    """Sets the tensor-parallel placements of weights and activations in a config."""
    qkv_bias: bool = False
    qk_norm: bool = False

    def decoder_config(self, hf: PreTrainedConfig, head: Head, enable_sequence_parallel: bool) -> Decoder.Config:
        """Return the config of the decoder with the output head `head`."""
        width = hf.hidden_size
        is_tied = head == "causal_lm" and hf.tie_word_embeddings
        config = self.decoder.Config(
            dim=width,
            vocab_size=hf.vocab_size,
            tok_embeddings=Embedding.Config(num_embeddings=hf.vocab_size, embedding_dim=width),
            norm=RMSNorm.Config(normalized_shape=width, eps=hf.rms_norm_eps),
            lm_head=OutputHead.Config(
                in_features=width,
                out_features=hf.vocab_size if head == "causal_lm" else 1,
                bias=head == "value",
                head=head,
            ),
            layers=[self._layer_config(hf, number) for number in range(hf.num_hidden_layers)],
            enable_weight_tying=is_tied,
        )
        self.set_sharding(config, enable_sp=enable_sequence_parallel)
        shardings = config.lm_head.sharding_config
        # The output layer reads its local rows. The single row of another head is not sharded.
        config.lm_head.sharding_config = (
            ShardingConfig(state_shardings=shardings.state_shardings) if head == "causal_lm" else None
        )
        return config

    def _layer_config(self, hf: PreTrainedConfig, number: int) -> TransformerBlock.Config:
        width, hidden, heads = hf.hidden_size, hf.intermediate_size, hf.num_attention_heads
        head_dim = getattr(hf, "head_dim", None) or width // heads
        is_windowed = (getattr(hf, "layer_types", None) or [])[number : number + 1] == ["sliding_attention"]

        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear.Config:
            return Linear.Config(in_features=inputs, out_features=outputs, bias=bias)

        def norm(size: int) -> RMSNorm.Config:
            return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps)

        attention = GQAttention.Config(
            n_heads=heads,
            n_kv_heads=hf.num_key_value_heads,
            head_dim=head_dim,
            dim=width,
            qkv_linear=QKVLinear.Config(
                head_dim=head_dim,
                wq=linear(width, heads * head_dim, self.qkv_bias),
                wkv=linear(width, hf.num_key_value_heads * head_dim, self.qkv_bias),
            ),
            wo=linear(heads * head_dim, width),
            qk_norm=norm(head_dim) if self.qk_norm else None,
            inner_attention=PackedAttention.Config(
                dropout=hf.attention_dropout, sliding_window=hf.sliding_window if is_windowed else None
            ),
            rope=_rope_config(hf, head_dim),
        )
        feed_forward = FeedForward.Config(w1=linear(width, hidden), w2=linear(hidden, width), w3=linear(width, hidden))
        return self.block.Config(
            attention=attention, feed_forward=feed_forward, attention_norm=norm(width), ffn_norm=norm(width)
        )

    def titan_name(self, name: str, config: Decoder.Config) -> str | None:
        """Return the name in torchtitan of the weight `name` in transformers, or None if there is none."""
        module, _, kind = name.rpartition(".")
        if module in SCALAR_HEADS:
            return f"lm_head.{kind}"
        layer = re.search(r"\d+", module)
        abstract = f"{re.sub(r'[0-9]+', '{}', module, count=1)}.weight"
        weight = self.adapter(config, None).from_hf_map.get(abstract)
        if weight is None:
            return None
        return weight.removesuffix("weight").format(layer and layer.group()) + kind


LLAMA = Family(
    LlamaDecoder, Llama3TransformerBlock, Llama3StateDictAdapter, parallelize_llama, set_llama3_sharding_config
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": Family(
        QwenDecoder,
        Qwen3TransformerBlock,
        Qwen3StateDictAdapter,
        parallelize_qwen3,
        partial(set_qwen3_sharding_config, enable_ep=False),
        qk_norm=True,
    ),
}
"""Supported model types of transformers."""


def _rope_config(hf: PreTrainedConfig, head_dim: int) -> RotaryEmbedding.Config:
    rope = hf.rope_parameters
    kind = rope["rope_type"]
    if kind not in STATIC_ROPES:
        raise EngineError(
            f"strategy=torchtitan does not support rope_type={kind}, only {', '.join(STATIC_ROPES)}; choose another "
            "model, or strategy=fsdp"
        )
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float, device="cpu") / head_dim
        frequencies, scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, device="cpu")
    return RotaryEmbedding.Config(frequencies=tuple(frequencies.tolist()), scaling=scaling)
