"""A transformers model that takes packed rows and gives the numbers reinforcement learning asks for.

    model = PackedModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED), "causal_lm")
    out = model(tokens, Packing([5, 3]), at=torch.tensor([3, 4, 7]), outputs=("log_probs", "entropy"))
    out["log_probs"]            # (3,): of tokens[3], tokens[4], tokens[7], each given the tokens before it

Engines wrap, shard and call a `PackedModel`; `loader.py` builds one from a folder. Weights keep the names that
transformers gives them: `model.hf.named_parameters()`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from camshaft.device import to_device
from camshaft.errors import EngineError
from camshaft.models.activations import Mode, checkpointing_kwargs
from camshaft.models.attention import PACKED, packed_kwargs, refuse_unsupported
from camshaft.models.cpu.rms_norm import fuse_norms
from camshaft.models.cpu.rotary import fuse_rotations
from camshaft.models.linear_logprob import VocabularyPart, linear_full_kl, linear_logprob, log_distribution
from camshaft.models.packing import Packing
from camshaft.models.sequence import SequenceSplit

Head = Literal["causal_lm", "value", "reward"]

OUTPUTS: dict[Head, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy", "distribution", "full_kl"),
    "value": ("values",),
    "reward": ("scores",),
}
"""What each head can give."""

LOGIT_FACTORS = {
    "cohere": ("logit_scale", 1),
    "cohere2": ("logit_scale", 1),
    "granite": ("logits_scaling", -1),
    "granitemoe": ("logits_scaling", -1),
    "granitemoeshared": ("logits_scaling", -1),
}
"""Model types that multiply (1) or divide (-1) their logits by a number, and the config key that has it."""

CHANGES_LOGITS = re.compile(r"^(final_|output_)?logits?_(soft_?cap|scal|mup)|^lm_head_mult")
"""Config keys by which a model changes its logits after the output head."""

NUMBER_HEADS = ("score", "classifier")
"""What transformers calls the layer that reads a number off the hidden states."""


class Untouched:
    """A tensor that comes to a model as it is: FSDP moves those that it sees to the device, and casts them to what it
    computes in."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class PackedModel(nn.Module):
    """A transformers model with one of three heads, called on rows packed side by side.

    With `sequence` set, the ranks of its group share the work of each call: see `sequence.py`.
    """

    sequence: SequenceSplit | None = None

    def __init__(self, hf: PreTrainedModel, head: Head):
        super().__init__()
        self.hf = hf
        self.head: Head = head
        _refuse_model(hf)
        fuse_norms(hf)
        fuse_rotations(hf)
        output = output_layer(hf, head)
        if head != "causal_lm" and isinstance(output, nn.Linear) and output.out_features != 1:
            raise EngineError(
                f"a {head} head gives one number, but that of {type(hf).__name__} gives {output.out_features}; "
                "load it with num_labels=1"
            )
        self.logit_factor = logit_factor(hf.config) if head == "causal_lm" else 1.0
        self.supports_prefix_sharing = supports_prefix_sharing(hf.config)

    def enable_gradient_checkpointing(self, mode: Mode = "full") -> None:
        """Compute each layer again in the backward pass (in train mode): from its input alone, or, where `mode` is
        selective, with the results of matrix products and attention kept."""
        if not self.hf.supports_gradient_checkpointing:
            raise EngineError(f"{type(self.hf).__name__} has no gradient checkpointing; turn it off for this model")
        self.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing_kwargs(mode))

    def forward(
        self,
        tokens: Tensor,
        packing: Packing,
        at: Tensor | Untouched,
        outputs: Sequence[str],
        temperature: float = 1.0,
        log_q: Tensor | Untouched | None = None,
    ) -> dict[str, Tensor]:
        """Compute `outputs` for the tokens at offsets `at` (M,) of the packed rows `tokens` (N,).

        "log_probs", "entropy" and "values" are (M,) and come from the hidden state before each of these tokens,
        so `at` never holds the first token of a row. "scores" are (B,), from the last token of each row; they
        do not look at `at`. All are float32, or float64 for a float64 model. "distribution" is (M, V): the log-probs of
        all words, without gradient. "full_kl" is (M,): the divergence from `log_q` (N, V), the distributions that
        another model gives for the same tokens; rows that `at` does not name are not read.

        `at` may be on the CPU wherever the tokens are, and its values are checked there only: elsewhere a check
        would wait for the device. A call with `sequence` set needs it there, and a sharded model `Untouched`.
        """
        at, log_q = _bare(at), None if log_q is None else _bare(log_q)
        self._check(tokens, packing, at, outputs)
        split = self.sequence
        before = packing.ends - 1 if self.head == "reward" else packing.previous(at)
        if split is None:
            read = self._hidden(tokens, packing, before)
            return self._numbers(read, tokens, at, outputs, temperature, log_q)
        share = split.share(before, len(tokens))
        read = self._hidden(*split.padded(tokens, packing), share.local)
        spoken_of = at if self.head == "reward" else at[share.mine]
        found = self._numbers(read, tokens, spoken_of, outputs, temperature, log_q)
        wide = {name: split.gather(share, found.pop(name))[0] for name in outputs if name == "distribution"}
        together = split.gather(share, *found.values()) if found else []
        return dict(zip(found, together, strict=True)) | wide

    def _hidden(self, tokens: Tensor, packing: Packing, rows: Tensor) -> Tensor:
        """The last hidden states of these rows of what this rank computes: all tokens, or its chunk of them."""
        inputs = packed_kwargs(packing, tokens.device)
        if self.sequence is not None:
            own = self.sequence.own(len(tokens))
            tokens, inputs["position_ids"] = tokens[own], inputs["position_ids"][:, own]
            inputs["exchange"] = self.sequence
        hidden = self.hf.base_model(input_ids=tokens[None], **inputs).last_hidden_state[0]
        return hidden.index_select(0, to_device(rows, tokens.device))

    def _numbers(
        self,
        hidden: Tensor,
        tokens: Tensor,
        at: Tensor,
        outputs: Sequence[str],
        temperature: float,
        log_q: Tensor | None,
    ) -> dict[str, Tensor]:
        """The outputs that the head gives for these hidden states, of which there may be none.

        Every parameter takes part all the same, so that ranks which exchange gradients have the same ones.
        """
        output = output_layer(self.hf, self.head)
        if self.head != "causal_lm":
            return {OUTPUTS[self.head][0]: _one_number(output, hidden)}
        if not isinstance(output, nn.Linear):
            raise EngineError(
                f"the projection on the vocabulary is a {type(output).__name__}, not a plain nn.Linear; "
                "leave lm_head out of the layers that an adapter or a quantiser replaces"
            )
        weight, bias, part = _rows_here(output)
        temperature /= self.logit_factor
        found: dict[str, Tensor | None] = {}
        if "distribution" in outputs:
            found["distribution"] = log_distribution(hidden, weight, bias, temperature, part)
        at = to_device(at, tokens.device)
        if "full_kl" in outputs:
            wanted = (len(tokens), len(output.weight))
            if log_q is None or log_q.shape != wanted:
                told = "none" if log_q is None else f"one of shape {tuple(log_q.shape)}"
                raise EngineError(f"full_kl compares with `log_q` of shape {wanted}, tokens by vocabulary; got {told}")
            found["full_kl"] = linear_full_kl(hidden, weight, log_q, at, bias, temperature, part=part)
        if found.keys() != set(outputs):
            found["log_probs"], found["entropy"] = linear_logprob(
                hidden, weight, tokens[at], bias, temperature, need_entropy="entropy" in outputs, part=part
            )
        return {name: tensor for name in outputs if (tensor := found[name]) is not None}

    def _check(self, tokens: Tensor, packing: Packing, at: Tensor, outputs: Sequence[str]) -> None:
        unknown = [name for name in outputs if name not in OUTPUTS[self.head]]
        if unknown or not outputs:
            raise EngineError(
                f"a {self.head} model gives {', '.join(OUTPUTS[self.head])}; asked for {list(outputs)}. "
                "The head is chosen by EngineModel.head"
            )
        if tokens.ndim != 1 or packing.size != len(tokens):
            raise EngineError(f"tokens of shape {tuple(tokens.shape)} are not rows of {packing.size} tokens in all")
        places = {torch.device("cpu")} | ({tokens.device} if self.sequence is None else set())
        if at.ndim != 1 or at.dtype != torch.int64 or at.device not in places:
            where = " or ".join(sorted(str(place) for place in places))
            raise EngineError(
                f"`at` must be int64 of shape (M,) on {where}, got {at.dtype} {tuple(at.shape)} on {at.device}"
            )
        if self.head != "reward" and at.device.type == "cpu" and len(at):
            if int(at.min()) < 0 or int(at.max()) >= len(tokens):
                raise EngineError(f"`at` must lie in 0..{len(tokens) - 1}, got {int(at.min())}..{int(at.max())}")
            first = at[torch.isin(at, packing.row_starts)]
            if len(first):
                raise EngineError(
                    f"`at` names {int(first[0])}, the first token of a row: nothing comes before it. "
                    "Clear loss_mask on the first token of each row"
                )


def supports_prefix_sharing(config: PreTrainedConfig) -> bool:
    """Return True if one computation of a prompt serves all of its responses, and the CPU kernel supports it.

    This takes a model without dropout, without a sliding window, and with keys as wide as values.
    """
    text = config.get_text_config()
    values = text.to_dict()
    by_chance = any("drop" in key and value for key, value in values.items())
    windowed = values.get("sliding_window") is not None and values.get("use_sliding_window") is not False
    return not by_chance and not windowed and values.get("v_head_dim") in (None, values.get("head_dim"))


def output_layer(hf: PreTrainedModel, head: Head) -> nn.Module:
    """The layer on top of the hidden states: the projection on the vocabulary, or the one to a single number."""
    if head == "causal_lm":
        output = hf.get_output_embeddings()
        if output is None:
            raise EngineError(f"{type(hf).__name__} has no projection on the vocabulary; load it as a causal LM")
        return output
    for name in NUMBER_HEADS:
        if name in hf._modules:
            return hf.get_submodule(name)
    raise EngineError(f"{type(hf).__name__} has no layer called 'score' or 'classifier' to read one number from")


def logit_factor(config: PreTrainedConfig) -> float:
    """The number by which a model of this config multiplies its logits; `EngineError` if it does more to them."""
    text = config.get_text_config()
    values = text.to_dict()
    known, power = LOGIT_FACTORS.get(text.model_type, ("", 1))
    for key, value in values.items():
        if key != known and CHANGES_LOGITS.search(key) and value not in (None, 1.0):
            raise EngineError(
                f"{text.model_type} models change their logits after the output head ({key}={value}), "
                "which the fused log-probs would miss; choose another model family"
            )
    return float(values[known]) ** power if known else 1.0


def _refuse_model(hf: PreTrainedModel) -> None:
    """What packed rows would get wrong in this model, read off its config, its class and its weights."""
    name = type(hf).__name__
    refuse_unsupported(hf.config)
    if hf._is_stateful:
        raise EngineError(f"{name} carries a recurrent state, which would leak from one packed row into the next")
    if not hf.is_backend_compatible():
        raise EngineError(f"{name} computes attention by itself and would ignore the borders of packed rows")
    sinks = next((weight for weight, _ in hf.named_parameters() if weight.endswith(".sinks")), None)
    if sinks is not None:
        raise EngineError(f"{name} has attention sinks ({sinks}), which packed attention would leave out")
    if hf.config._attn_implementation != PACKED:
        raise EngineError(
            f"{name} was built with attn_implementation='{hf.config._attn_implementation}'; build it with '{PACKED}'"
        )


def _bare(given: Tensor | Untouched) -> Tensor:
    return given.tensor if isinstance(given, Untouched) else given


def _rows_here(output: nn.Linear) -> tuple[Tensor, Tensor | None, VocabularyPart | None]:
    """Weight and bias of a projection; its rows on this rank, and which they are, where these are cut over ranks."""
    weight, bias = output.weight, output.bias
    if not isinstance(weight, DTensor):
        return weight, bias, None
    mesh = weight.device_mesh
    if weight.placements != (Shard(0),):
        raise EngineError(f"the projection on the vocabulary is laid out as {weight.placements} on {mesh}, not by rows")
    part = VocabularyPart(mesh.get_group(), mesh.get_local_rank() * -(-len(weight) // mesh.size()))
    return weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias, part


def _one_number(layer: nn.Module, hidden: Tensor) -> Tensor:
    """One number per row of `hidden`, computed in float32 or wider: half precision would round large values."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if not isinstance(layer, nn.Linear):
        return layer(hidden).to(wide)[:, 0].clone()
    bias = None if layer.bias is None else layer.bias.to(wide)
    # Not a view: a caller's in-place operation on one would drop the hooks by which FSDP notices the backward pass.
    return nn.functional.linear(hidden.to(wide), layer.weight.to(wide), bias)[:, 0].clone()
