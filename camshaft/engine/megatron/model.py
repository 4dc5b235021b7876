"""The model of a Megatron engine: GPT stages that are called on packed rows.

    model = MegatronModel(hf, "causal_lm", config, groups, device)
    out = model(*inputs)                                      # `ModelInputs`, as for `PackedModule`

A stage holds consecutive layers. The first one embeds tokens, and the last one computes outputs. Every rank of a
tensor-parallel group passes the same tokens and gets the same outputs.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from camshaft.device import to_device
from camshaft.engine.megatron.architecture import RotaryAngles
from camshaft.engine.megatron.layers import PackedRows, block_spec, observe_routers
from camshaft.engine.megatron.routing import Routers, RowRouting
from camshaft.engine.micro_batches import ModelInputs
from camshaft.models.attention import packed_kwargs
from camshaft.models.linear_logprob import VocabularyShard
from camshaft.models.packed import (
    Head,
    HeadInputs,
    OpaqueTensor,
    check_inputs,
    head_outputs,
    logit_factor,
    output_layer,
    unwrap,
    vocabulary_outputs,
)
from camshaft.models.packing import Packing, pad_tokens
from camshaft.models.sequence import SequenceSplit


class Stage(GPTModel):
    """Consecutive layers of the model."""

    padding_token: int | None = None

    def forward(self, tokens: Tensor, angles: Tensor, rows: PackedRows) -> Tensor:  # pyright: ignore
        """Return the hidden states (N, 1, H) after this stage; with sequence parallelism, those of this rank."""
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=tokens[None], position_ids=None)
            if self.padding_token is not None:
                # As in transformers, the embedding of the padding token receives no gradient from its occurrences.
                local_tokens = tokens.view(-1, len(hidden))[
                    self.tp_group.rank() if self.config.sequence_parallel else 0
                ]
                hidden = hidden.where((local_tokens != self.padding_token)[:, None, None], hidden.detach())
        return self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=rows)


@dataclass(frozen=True)
class Call:
    """Arguments of `MegatronModel.forward`, checked, and the padded tokens that the stages receive."""

    packing: Packing
    head_inputs: HeadInputs
    padded: Tensor
    """Tokens that this rank's stages receive: the packed tokens with padding, or this rank's chunk of them."""
    angles: Tensor
    rows: PackedRows
    size: int
    """Number of packed tokens with padding, on all context-parallel ranks."""


class MegatronModel(nn.Module):
    """The stages of this rank, and the output head."""

    supports_prefix_sharing = False
    pads_rows = False

    def __init__(
        self,
        hf: PreTrainedModel,
        head: Head,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
    ):
        super().__init__()
        self.masters: nn.ParameterList | None = None
        """Master weights of the stages' parameters, in their order; None if the optimizer updates the parameters."""
        text: Any = hf.config.get_text_config()
        self.config, self.groups = config, groups
        self.head: Head = head
        self.hidden_size, self.vocabulary_size = config.hidden_size, text.vocab_size
        self.logit_factor = logit_factor(hf.config) if head == "causal_lm" else 1.0
        self.angles = RotaryAngles(hf)
        self.routers: Routers | None = None
        if config.num_moe_experts is not None:
            is_normalized = not config.moe_router_pre_softmax
            self.routers = Routers(config.num_layers, config.num_moe_experts, config.moe_router_topk, is_normalized)
        self.sequence = SequenceSplit(groups.cp, device) if groups.cp.size() > 1 else None
        """Split of the tokens over context-parallel ranks."""
        ranks = groups.tp.size()
        self.rows_per_rank = -(-self.vocabulary_size // ranks)
        """Rows of the vocabulary on each tensor-parallel rank, with padding on the last one."""
        first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
        self.tied = head == "causal_lm" and bool(text.tie_word_embeddings)
        virtual = config.virtual_pipeline_model_parallel_size
        numbers = [None] if virtual is None else list(range(virtual))
        self.stages = nn.ModuleList(
            Stage(
                config,
                block_spec(config, groups, number),  # pyright: ignore[reportArgumentType]
                vocab_size=self.rows_per_rank * ranks,
                max_sequence_length=text.max_position_embeddings,
                pre_process=first and number == numbers[0],
                post_process=last and number == numbers[-1],
                position_embedding_type="none",
                share_embeddings_and_output_weights=self.tied,
                pg_collection=groups,
                vp_stage=number,
            )
            for number in numbers
        )
        if self.routers is not None:
            for each in self.stages:
                observe_routers(each.decoder.layers)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        embedding: Any = hf.get_input_embeddings()
        stage: Any = self.stages[0]
        stage.padding_token = embedding.padding_idx
        if last and head != "causal_lm":
            bias = getattr(output_layer(hf, head), "bias", None) is not None
            self.stages[-1].output_layer = nn.Linear(self.hidden_size, 1, bias=bias, dtype=config.params_dtype)

    def forward(
        self,
        tokens: Tensor,
        packing: Packing,
        at: OpaqueTensor,
        outputs: Sequence[str],
        temperature: float,
        log_q: OpaqueTensor | None,
    ) -> dict[str, Tensor]:
        """Compute `outputs` for the tokens at offsets `at`, as `PackedModule.forward` does."""
        call = self.prepare(ModelInputs(tokens, packing, at, outputs, temperature, log_q))
        return self.apply_head(self.stages[0](call.padded, call.angles, call.rows), call)

    def prepare(self, inputs: ModelInputs, length: int = 0, routing: RowRouting | None = None) -> Call:
        """Check the inputs and pad the packed tokens to `length` and to a multiple of the ranks that split them.

        `routing` gets the tokens of this rank.
        """
        tokens, packing, outputs = inputs.tokens, inputs.packing, inputs.outputs
        at, log_q = unwrap(inputs.at), None if inputs.log_q is None else unwrap(inputs.log_q)
        check_inputs(self.head, tokens, packing, at, outputs, {tokens.device, torch.device("cpu")})
        size = max(length, len(tokens))
        size += -size % (self.groups.cp.size() * (self.groups.tp.size() if self.config.sequence_parallel else 1))
        extra = size - len(tokens)
        # The padding is a row of its own, to which no other token attends.
        kwargs = packed_kwargs(Packing([*packing.lengths, extra]) if extra else packing, tokens.device)
        chunk = slice(None) if self.sequence is None else self.sequence.chunk(size)
        angles = self.angles(kwargs.pop("position_ids")[0, chunk])
        local_tokens = pad_tokens(tokens, extra)[chunk]
        if routing is not None:
            weights = F.pad(inputs.packing.row_counts() * (not routing.is_dummy), (0, extra))[chunk]
            routing.weights = self._local(to_device(weights, tokens.device))
            if routing.experts is not None:
                nothing = torch.iinfo(routing.experts.dtype).max
                experts = F.pad(routing.experts, (0, 0, 0, 0, 0, extra), value=nothing)[chunk]
                routing.experts = self._local(experts)
        head_inputs = HeadInputs(tokens, at, outputs, inputs.temperature / self.logit_factor, log_q)
        return Call(packing, head_inputs, local_tokens, angles, PackedRows(inputs=kwargs, routing=routing), size)

    def _local(self, tokens: Tensor) -> Tensor:
        """Return the part of the tokens of a stage that this rank routes."""
        if not self.config.sequence_parallel:
            return tokens
        return tokens.chunk(self.groups.tp.size())[self.groups.tp.rank()]

    def apply_head(self, hidden: Tensor, call: Call) -> dict[str, Tensor]:
        """Compute the outputs from the hidden states of the last stage."""
        if self.config.sequence_parallel:
            # The gradient is equal on all ranks, so each rank keeps its part of it.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        head_inputs, split = call.head_inputs, self.sequence
        previous = call.packing.ends - 1 if self.head == "reward" else call.packing.previous(head_inputs.at)
        if split is None:
            return self._outputs(hidden[:, 0].index_select(0, to_device(previous, hidden.device)), head_inputs)
        share = split.share(previous, call.size)
        rows = hidden[:, 0].index_select(0, to_device(share.offsets, hidden.device))
        local_at = head_inputs.at if self.head == "reward" else head_inputs.at[share.indices]
        return split.gather_outputs(share, self._outputs(rows, head_inputs._replace(at=local_at)))

    def _outputs(self, rows: Tensor, inputs: HeadInputs) -> dict[str, Tensor]:
        """Compute the outputs of the tokens `inputs.at` from the hidden states (M, H) before them."""
        stage: Any = self.stages[-1]
        if self.head != "causal_lm":
            return head_outputs(stage.output_layer, self.head, rows, inputs)
        weight, shard = stage.shared_embedding_or_output_weight() if self.tied else stage.output_layer.weight, None
        if self.groups.tp.size() > 1:
            first = self.groups.tp.rank() * self.rows_per_rank
            weight, shard = weight[: self.vocabulary_size - first], VocabularyShard(self.groups.tp, first)
        return vocabulary_outputs(rows, inputs, weight, None, shard, self.vocabulary_size)
