"""A transformers model that is called on packed rows and returns the outputs that reinforcement learning needs.

    model = PackedModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED), "causal_lm")
    out = model(tokens, Packing([5, 3]), at=torch.tensor([3, 4, 7]), outputs=("log_probs", "entropy"))
    out["log_probs"]            # (3,): log-probs of tokens[3], tokens[4], tokens[7], each given the tokens before it

`loader.py` builds a `PackedModel` from a folder. Engines wrap, shard and call it. Weights keep their names in
`transformers`, those of `model.hf.named_parameters()`.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import ModelOutput

from camshaft.config.engine import Head
from camshaft.config.families.support import (
    LOGIT_FACTORS,
    LOGIT_SOFTCAPS,
    RESETS_STATE,
    alternative,
    refusal,
    rope_limit,
    unsupported,
)
from camshaft.device import to_device
from camshaft.errors import EngineError
from camshaft.models.activations import Mode, checkpointing_kwargs
from camshaft.models.adapted_head import adapted_head, is_adapted
from camshaft.models.attention import PACKED, config_values, packed_kwargs, reject_unsupported
from camshaft.models.classes import decoder_name
from camshaft.models.cpu import replace_norms
from camshaft.models.heads import OUTPUTS, default_output
from camshaft.models.linear_logprob import VocabularyShard, linear_full_kl, linear_logprob, log_distribution
from camshaft.models.packing import Packing
from camshaft.models.padded_rows import padded_hidden_states, runs_padded
from camshaft.models.recurrent import pack_recurrent_layers
from camshaft.models.routing import SAMPLING_ROUTERS, Routers, find_routers
from camshaft.models.sequence import SequenceSplit

SCALED_HIDDEN = ("inkling_text", "minicpm3")
"""Model types that scale the hidden states, instead of the logits, by the factor in `LOGIT_FACTORS`."""

HEAD_LAYERS = {"ModernBertDecoderForCausalLM": "lm_head", "ModernBertDecoderForSequenceClassification": "head"}
"""Name of the layers between the hidden states and the output layer, for classes that have some."""

SCALAR_HEADS = ("score", "classifier")
"""Names in `transformers` of the layer that maps a hidden state to one number."""


class OpaqueTensor:
    """Wraps a tensor argument so that FSDP neither moves it to the device nor casts it to the compute dtype."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class PackedModule(nn.Module, ABC):
    """A decoder with a language-model, value or reward head, called on packed rows. Engines train any subclass.

    A subclass sets `head`, `hidden_size`, `vocabulary_size` and `supports_prefix_sharing`. If `sequence` is set, the
    ranks of a sequence-parallel group split the tokens of each call (`sequence.py`).
    """

    head: Head
    sequence: SequenceSplit | None = None
    routers: Routers | None = None
    """Routers of a mixture of experts; None for a dense model."""
    supports_prefix_sharing: bool
    pads_rows: bool = False
    """True if the decoder is called on right-padded rows (`padded_rows.py`)."""
    hidden_size: int
    """Width of the hidden states."""
    vocabulary_size: int
    """Number of token ids that the embedding layer accepts."""

    @abstractmethod
    def weight_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in `transformers`; tied parameters once."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names in `transformers` and the live weights, detached: parameters and persistent buffers."""

    @abstractmethod
    def hidden_states(self, tokens: Tensor, packing: Packing, rows: Tensor) -> Tensor:
        """Return the last hidden states at offsets `rows` of this rank's tokens: all tokens, or this rank's chunk."""

    @abstractmethod
    def apply_head(
        self,
        hidden: Tensor,
        tokens: Tensor,
        at: Tensor,
        outputs: Sequence[str],
        temperature: float,
        log_q: Tensor | None,
    ) -> dict[str, Tensor]:
        """Compute `outputs` from `hidden` (M, H), the last hidden states before the tokens `at` (M,).

        The other arguments are those of `forward`. For a reward head, `hidden` holds the states of the last token of
        each row. M may be 0.
        """

    def forward(
        self,
        tokens: Tensor,
        packing: Packing,
        at: Tensor | OpaqueTensor,
        outputs: Sequence[str],
        temperature: float = 1.0,
        log_q: Tensor | OpaqueTensor | None = None,
        targets: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute `outputs` for the tokens at offsets `at` (M,) of the packed rows `tokens` (N,).

        - "log_probs", "entropy", "sum_pi_squared" and "values" are (M,). They are computed from the hidden state before
          each token, so `at` must not contain the first token of a row.
        - "target_log_probs" are (M,): the log-probs of `targets[at]` in place of `tokens[at]`; `targets` is (N,) int64.
        - "scores" are (B,), computed from the last token of each row. They do not depend on `at`.
        - "distribution" is (M, V): the log-probs of the whole vocabulary, without gradient.
        - "full_kl" is (M,): KL(p || q) of the model's distribution p. `log_q` (N, V) holds the log-probs of another
          model for the same tokens; only its rows `at` are read.

        Outputs are float32, or float64 for a float64 model. Keep `at` on the CPU. Its values are checked only there,
        since a check on an accelerator would wait for the device, and sequence parallelism requires it. For a model
        that FSDP shards, wrap `at` and `log_q` in `OpaqueTensor`.
        """
        at, log_q = unwrap(at), None if log_q is None else unwrap(log_q)
        self.check_inputs(tokens, packing, at, outputs)
        split, apply_head = self.sequence, self.apply_head
        if targets is not None:
            apply_head = functools.partial(self._score_targets, targets)
        previous_offsets = packing.ends - 1 if self.head == "reward" else packing.previous(at)
        if split is None:
            hidden = self.hidden_states(tokens, packing, previous_offsets)
            return apply_head(hidden, tokens, at, outputs, temperature, log_q)
        share = split.share(previous_offsets, len(tokens))
        hidden = self.hidden_states(*split.pad(tokens, packing), share.offsets)
        local_at = at if self.head == "reward" else at[share.indices]
        return split.gather_outputs(share, apply_head(hidden, tokens, local_at, outputs, temperature, log_q))

    def _score_targets(
        self,
        targets: Tensor,
        hidden: Tensor,
        tokens: Tensor,
        at: Tensor,
        outputs: Sequence[str],
        temperature: float,
        log_q: Tensor | None,
    ) -> dict[str, Tensor]:
        """Compute `outputs`; for "target_log_probs", the head is applied with the targets as tokens."""
        results = self.apply_head(hidden, targets, at, ("log_probs",), temperature, None)
        results["target_log_probs"] = results.pop("log_probs")
        others = [name for name in outputs if name != "target_log_probs"]
        return results | (self.apply_head(hidden, tokens, at, others, temperature, log_q) if others else {})

    def check_inputs(self, tokens: Tensor, packing: Packing, at: Tensor, outputs: Sequence[str]) -> None:
        """Raise `EngineError` if arguments of `forward` contradict each other or the head."""
        devices = {torch.device("cpu")} | ({tokens.device} if self.sequence is None else set())
        check_inputs(self.head, tokens, packing, at, outputs, devices)


def check_inputs(
    head: Head, tokens: Tensor, packing: Packing, at: Tensor, outputs: Sequence[str], devices: Set[torch.device]
) -> None:
    """Raise `EngineError` if arguments of `PackedModule.forward` contradict each other or the head.

    `devices` are the devices that `at` may be on.
    """
    unsupported = [name for name in outputs if name not in OUTPUTS[head]]
    if unsupported or not outputs:
        raise EngineError(
            f"a model with head={head} supports the outputs {', '.join(OUTPUTS[head])}, got "
            f"{list(outputs)}; request supported outputs, or set another EngineModel.head"
        )
    if tokens.ndim != 1 or packing.size != len(tokens):
        raise EngineError(
            f"tokens of shape {tuple(tokens.shape)} do not match a packing of {packing.size} tokens; concatenate "
            "the packed rows to one tensor of shape (N,)"
        )
    if at.ndim != 1 or at.dtype != torch.int64 or at.device not in devices:
        names = " or ".join(sorted(str(device) for device in devices))
        raise EngineError(
            f"`at` must be int64 of shape (M,) on {names}, got {at.dtype} of shape {tuple(at.shape)} on "
            f"{at.device}; convert it"
        )
    if head != "reward" and at.device.type == "cpu" and len(at):
        if int(at.min()) < 0 or int(at.max()) >= len(tokens):
            raise EngineError(
                f"`at` must hold offsets in 0..{len(tokens) - 1}, got values in {int(at.min())}..{int(at.max())}"
            )
        first_tokens = at[torch.isin(at, packing.row_starts)]
        if len(first_tokens):
            raise EngineError(
                f"`at` contains offset {int(first_tokens[0])}, the first token of a row, which the model does not "
                "predict; set loss_mask to 0 on the first token of each row"
            )


class PackedModel(PackedModule):
    """A transformers model with a language-model, value or reward head."""

    def __init__(self, hf: PreTrainedModel, head: Head):
        super().__init__()
        self.hf = hf
        self.head = head
        hf.base_model_prefix = decoder_name(type(hf))
        self.pads_rows = runs_padded(hf.config)
        if not self.pads_rows:
            _check_packable(hf)
        replace_norms(hf)
        pack_recurrent_layers(hf)
        output = output_layer(hf, head)
        if head != "causal_lm" and isinstance(output, nn.Linear) and output.out_features != 1:
            raise EngineError(
                f"a {head} head must have one output, but that of {type(hf).__name__} has {output.out_features}; load "
                "the model with num_labels=1"
            )
        _check_head_input(hf, output, head)
        self.logit_factor = logit_factor(hf.config) if head == "causal_lm" else 1.0
        self.logit_softcap = logit_softcap(hf.config)
        self.supports_prefix_sharing = supports_prefix_sharing(hf.config)
        self.routers = None if self.pads_rows else find_routers(hf)
        self._sampling_routers = [m for m in hf.modules() if type(m).__name__ in SAMPLING_ROUTERS]
        self.hidden_size = hf.config.get_text_config().hidden_size
        self.vocabulary_size = len(hf.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
        self.rope_limit = rope_limit(config_values(hf.config))

    def weight_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.hf.named_parameters())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_tensors(self.hf)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for router in self._sampling_routers:
            router.eval()
        return self

    def enable_gradient_checkpointing(self, mode: Mode = "full") -> None:
        """Recompute layers in the backward pass, in train mode only.

        Mode "full" saves only the input of each layer. Mode "selective" also saves the results of matrix products and
        attention.
        """
        if not self.hf.supports_gradient_checkpointing:
            raise EngineError(
                f"{type(self.hf).__name__} does not support gradient checkpointing; set "
                "enable_gradient_checkpointing=False"
            )
        hf, kwargs = cast(Any, self.hf), checkpointing_kwargs(mode)
        if hasattr(hf, "activation_checkpointing_enable"):  # which deprecates the other method
            hf.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:
            hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def check_inputs(self, tokens: Tensor, packing: Packing, at: Tensor, outputs: Sequence[str]) -> None:
        super().check_inputs(tokens, packing, at, outputs)
        limit = self.rope_limit
        if limit is not None and len(packing.lengths) > 1 and packing.longest_context > limit.tokens:
            raise EngineError(
                f"a row of {packing.longest_context} tokens is longer than {limit.key}={limit.tokens}, which changes "
                f"the {limit.rope_type} rotary frequencies of all rows of the micro-batch; "
                f"limit prompts and responses to {limit.tokens} tokens together, or use micro-batches of one row"
            )

    def hidden_states(self, tokens: Tensor, packing: Packing, rows: Tensor) -> Tensor:
        rows = to_device(rows, tokens.device)
        if self.pads_rows:
            return padded_hidden_states(self.hf.base_model, tokens, packing).index_select(0, rows)
        inputs = packed_kwargs(packing, tokens.device)
        if self.sequence is not None:
            chunk = self.sequence.chunk(len(tokens))
            tokens, inputs["position_ids"] = tokens[chunk], inputs["position_ids"][:, chunk]
            inputs["exchange"] = self.sequence
        return self.hf.base_model(input_ids=tokens[None], **inputs).last_hidden_state[0].index_select(0, rows)

    def apply_head(
        self,
        hidden: Tensor,
        tokens: Tensor,
        at: Tensor,
        outputs: Sequence[str],
        temperature: float,
        log_q: Tensor | None,
    ) -> dict[str, Tensor]:
        if (layers := HEAD_LAYERS.get(type(self.hf).__name__)) is not None:
            hidden = self.hf.get_submodule(layers)(hidden)
        inputs = HeadInputs(tokens, at, outputs, temperature / self.logit_factor, log_q, self.logit_softcap)
        return head_outputs(output_layer(self.hf, self.head), self.head, hidden, inputs)


class HeadInputs(NamedTuple):
    """Arguments of `apply_head`, except the hidden states."""

    tokens: Tensor
    at: Tensor
    outputs: Sequence[str]
    temperature: float
    """Divided by the logit factor of the model."""
    log_q: Tensor | None
    softcap: float | None = None
    """Limit of the absolute logits before the temperature (`linear_logprob.py`)."""


def head_outputs(output: nn.Module, head: Head, hidden: Tensor, inputs: HeadInputs) -> dict[str, Tensor]:
    """Compute the outputs of a head from `hidden` with the output layer `output`.

    Even if `hidden` has no rows, all parameters of the layer are part of the autograd graph, so that all ranks reduce
    gradients of the same parameters.
    """
    if head != "causal_lm":
        return {default_output(head): _scalar_output(output, hidden)}
    if not isinstance(output, nn.Linear):
        if is_adapted(output):
            hidden, weight, bias = adapted_head(output, hidden)
            return vocabulary_outputs(hidden, inputs, weight, bias, None, vocabulary_size=len(weight))
        raise EngineError(
            f"the output layer is a {type(output).__name__}, not an nn.Linear; exclude lm_head from the layers "
            "that a quantizer replaces"
        )
    return vocabulary_outputs(hidden, inputs, *_local_rows(output), vocabulary_size=len(output.weight))


def vocabulary_outputs(
    hidden: Tensor,
    inputs: HeadInputs,
    weight: Tensor,
    bias: Tensor | None,
    shard: VocabularyShard | None,
    vocabulary_size: int,
) -> dict[str, Tensor]:
    """Compute the outputs of a causal language model from `hidden` with this rank's rows of the output layer."""
    tokens, at, outputs, temperature, log_q, softcap = inputs
    results: dict[str, Tensor | None] = {}
    if "distribution" in outputs:
        results["distribution"] = log_distribution(hidden, weight, bias, temperature, shard, softcap)
    at = to_device(at, tokens.device)
    if "full_kl" in outputs:
        shape = (len(tokens), vocabulary_size)
        if log_q is None or log_q.shape != shape:
            actual = None if log_q is None else tuple(log_q.shape)
            raise EngineError(
                f"full_kl requires `log_q` of shape {shape} (tokens, vocabulary), got {actual}; pass the "
                "'distribution' of another model for the same batch"
            )
        results["full_kl"] = linear_full_kl(hidden, weight, log_q, at, bias, temperature, shard=shard, softcap=softcap)
    if results.keys() != set(outputs):
        results |= linear_logprob(
            hidden, weight, tokens[at], bias, temperature, outputs, shard=shard, softcap=softcap
        )._asdict()
    return {name: tensor for name in outputs if (tensor := results[name]) is not None}


def supports_prefix_sharing(config: PreTrainedConfig) -> bool:
    """Return True if models of this config can compute a prompt once for all of its responses.

    Device and dtype must support it, too (`attention.least_shared`).
    """
    return not unsupported("prefix sharing", config_values(config))


def output_layer(hf: PreTrainedModel, head: Head) -> nn.Module:
    """Return the layer that maps hidden states to logits, or to one number for a value or reward head."""
    if head == "causal_lm":
        output = hf.get_output_embeddings()
        if output is None:
            raise EngineError(
                f"{type(hf).__name__} has no output layer to the vocabulary; load the model as a causal language model"
            )
        return output
    return hf.get_submodule(scalar_head(hf))


def scalar_head(hf: PreTrainedModel) -> str:
    """Return the name of the layer that maps a hidden state to one number."""
    for name in SCALAR_HEADS:
        if name in hf._modules:
            return name
    raise EngineError(
        f"{type(hf).__name__} has no layer named 'score' or 'classifier'; load the model as a classification model"
    )


def named_tensors(hf: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of a model, detached; tied parameters are yielded once.

    A DTensor on a single rank becomes a regular tensor, because each operator on a DTensor is slow on the host.
    """
    for name, parameter in hf.named_parameters():
        yield name, _local(parameter).detach()
    for name, buffer in hf.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in hf.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer.detach()


def _local(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1:
        return parameter._local_tensor  # with `to_local`, a weight sync takes longer on the host
    return parameter


def logit_factor(config: PreTrainedConfig) -> float:
    """Return the factor by which models of this config scale their logits.

    Raise `EngineError` if they change their logits in any other way.
    """
    values = config_values(config)
    if message := refusal("fused log-probs", values):
        raise EngineError(f"{message}; {alternative(values)}")
    key, power = LOGIT_FACTORS.get(values["model_type"], ("", 1))
    return float(getattr(config.get_text_config(), key)) ** power if key else 1.0


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """Return the limit of the absolute logits of models of this config, or None."""
    text_config = config.get_text_config()
    key = LOGIT_SOFTCAPS.get(text_config.model_type)
    return None if key is None else getattr(text_config, key)


class _HeadReached(Exception):
    """Ends a model call at the output layer, whose input is the argument."""


def _check_head_input(hf: PreTrainedModel, output: nn.Module, head: Head) -> None:
    """Raise `EngineError` if the input of the output layer is not the hidden states of the decoder."""
    text_config = hf.config.get_text_config()
    if (head == "causal_lm" and text_config.model_type in SCALED_HIDDEN) or type(hf).__name__ in HEAD_LAYERS:
        return
    hidden = torch.zeros(1, 2, text_config.hidden_size, dtype=hf.dtype, device=hf.device)
    head_input = None if hf.base_model is hf else _head_input(hf, output, hidden)
    source = head_input if head_input is None or head_input._base is None else head_input._base
    if head_input is None or source is not hidden or head_input.shape != hidden.shape:
        raise EngineError(
            f"{type(hf).__name__} does not pass the hidden states of its decoder unchanged to the output layer, which "
            "packed rows require; choose another model family"
        )


class _FixedDecoder(nn.Module):
    """Replaces a decoder and those inside it, and returns fixed results. Its other attributes are the decoder's."""

    def __init__(self, decoder: nn.Module, results: ModelOutput):
        super().__init__()
        self._decoder, self._results = (decoder,), results  # a module in a tuple is not a submodule
        self._modules.update(
            (name, _FixedDecoder(child, results) if isinstance(child, PreTrainedModel) else child)
            for name, child in decoder.named_children()
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._decoder[0], name)

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        return self._results


@torch.no_grad()
def _head_input(hf: PreTrainedModel, output: nn.Module, hidden: Tensor) -> Tensor | None:
    """Return the input of the output layer if the decoder returns `hidden`; None if the layer is not called.

    The decoder does not run, so this is fast for a large model and works on the meta device.
    """
    results = BaseModelOutputWithPoolingAndCrossAttentions(
        last_hidden_state=hidden,  # pyright: ignore[reportArgumentType]
        pooler_output=torch.zeros_like(hidden[:, 0]),  # pyright: ignore[reportArgumentType]
    )

    def stop(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        raise _HeadReached(arguments[0])

    model, was_training = copy.copy(hf), hf.training
    model._modules = hf._modules | {hf.base_model_prefix: _FixedDecoder(hf.base_model, results)}
    handle = output.register_forward_pre_hook(stop)
    try:
        model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=hidden.device))
    except _HeadReached as reached:
        return reached.args[0]
    finally:
        handle.remove()
        hf.train(was_training)
    return None


def _check_packable(hf: PreTrainedModel) -> None:
    """Raise `EngineError` if the config, class or weights show that the model does not support packed rows."""
    name = type(hf).__name__
    reject_unsupported(hf.config)
    is_recurrent = hf.config.get_text_config().model_type in RESETS_STATE
    if hf._is_stateful and not is_recurrent:
        raise EngineError(f"{name} has a recurrent state, which would leak between packed rows; choose another model")
    if not hf.is_backend_compatible() and not is_recurrent:
        raise EngineError(
            f"{name} does not use the attention interface of transformers, so its tokens would attend to other packed "
            "rows; choose another model"
        )
    if hf.config._attn_implementation != PACKED:
        raise EngineError(
            f"{name} was built with attn_implementation='{hf.config._attn_implementation}'; build it with '{PACKED}'"
        )


def unwrap(argument: Tensor | OpaqueTensor) -> Tensor:
    """Return the tensor of an argument that may be wrapped in `OpaqueTensor`."""
    return argument.tensor if isinstance(argument, OpaqueTensor) else argument


def _local_rows(output: nn.Linear) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """Return this rank's rows of the output layer's weight and bias, and the range of token ids that they cover.

    The range is None if the layer is not sharded.
    """
    weight, bias = output.weight, output.bias
    if not isinstance(weight, DTensor):
        return weight, bias, None
    mesh = weight.device_mesh
    if weight.placements != (Shard(0),):
        raise EngineError(
            f"the output layer has placements {weight.placements} on {mesh}, which are not supported; shard it by "
            "rows with Shard(0)"
        )
    shard = VocabularyShard(mesh.get_group(), mesh.get_local_rank() * -(-len(weight) // mesh.size()))
    return weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias, shard


def _scalar_output(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Map each row of `hidden` to one number, in float32 or wider because half precision would round large values."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if not isinstance(layer, nn.Linear):
        return layer(hidden).to(dtype)[:, 0].clone()
    bias = None if layer.bias is None else layer.bias.to(dtype)
    # Clone the view: an in-place operation on it would drop the hooks by which FSDP detects the backward pass.
    return nn.functional.linear(hidden.to(dtype), layer.weight.to(dtype), bias)[:, 0].clone()
