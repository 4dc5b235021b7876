"""A decoder of torchtitan that is called on packed rows.

packed = TitanModel(decoder, "value", hf_config, template, names)
packed(tokens, packing, at, ("values",))                     # as `PackedModel`
"""

# pyright: reportMissingImports=false
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from camshaft.device import to_device
from camshaft.engine.micro_batches import ModelInputs
from camshaft.engine.torchtitan.families import PackedDecoder
from camshaft.models.attention import packed_kwargs
from camshaft.models.packed import Head, HeadInputs, PackedModule, supports_prefix_sharing
from camshaft.models.packing import Packing, pad_tokens

WRAPPED = "_checkpoint_wrapped_module."
"""Prefix that activation checkpointing inserts into parameter names."""


class TitanModel(PackedModule):
    """A decoder of torchtitan with a language-model, value or reward head, or one of its pipeline stages."""

    def __init__(
        self,
        decoder: PackedDecoder,
        head: Head,
        hf: PreTrainedConfig,
        template: Mapping[str, Tensor],
        names: Mapping[str, str],
        token_multiple: int = 1,
    ):
        """Wrap a parallelized decoder.

        `template` holds the weights of the whole model by their names in transformers, on the meta device. `names` maps
        these names to those in the decoder. The tokens of a call are padded to a multiple of `token_multiple`: the
        number of ranks over which sequence parallelism splits them, or 1.
        """
        super().__init__()
        self.decoder = decoder
        self.head = head
        self.template, self.names, self.token_multiple = dict(template), dict(names), token_multiple
        self.supports_prefix_sharing = supports_prefix_sharing(hf)
        self.shared_name: str | None = None
        """Name in transformers of a weight that this pipeline stage shares with another one; None if there is none."""
        self.vocabulary_size = hf.vocab_size
        self.hidden_size = hf.hidden_size
        self._last_output: Tensor | None = None

    def weight_parameters(self) -> dict[str, nn.Parameter]:
        parameters = {name.replace(WRAPPED, ""): p for name, p in self.decoder.named_parameters()}
        return {name: parameters[titan_name] for name, titan_name in self.names.items() if titan_name in parameters}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.weight_parameters().items():
            yield name, parameter.detach()

    def decoder_inputs(self, tokens: Tensor, packing: Packing) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the arguments of the decoder: this rank's tokens (1, n), their positions (1, n), and the packing."""
        if self.sequence is not None:
            tokens, packing = self.sequence.pad(tokens, packing)
        extra = -len(tokens) % self.token_multiple
        if extra:  # a segment at the end, to which no other token attends
            prefixes = None if packing.prefix_of is None else [*packing.prefix_of, None]
            tokens, packing = pad_tokens(tokens, extra), Packing([*packing.lengths, extra], prefixes)
        inputs = packed_kwargs(packing, tokens.device)
        positions = inputs.pop("position_ids")
        if self.sequence is not None:
            chunk = self.sequence.chunk(len(tokens))
            tokens, positions = tokens[chunk], positions[:, chunk]
            inputs["exchange"] = self.sequence
        return tokens[None], positions, inputs

    def hidden_states(self, tokens: Tensor, packing: Packing, rows: Tensor) -> Tensor:
        hidden = self._last_output
        if hidden is None:
            hidden = self.decoder(*self.decoder_inputs(tokens, packing))
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local()
        return hidden[0].index_select(0, to_device(rows, tokens.device))

    def outputs_of_last_stage(self, hidden: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        """Return what `forward(*inputs.arguments())` returns, from the output `hidden` of the last pipeline stage."""
        self._last_output = hidden
        try:
            return self(*inputs.arguments())
        finally:
            self._last_output = None

    def apply_head(
        self,
        hidden: Tensor,
        tokens: Tensor,
        at: Tensor,
        outputs: Sequence[str],
        temperature: float,
        log_q: Tensor | None,
    ) -> dict[str, Tensor]:
        return self.decoder.lm_head(hidden, HeadInputs(tokens, at, outputs, temperature, log_q))
