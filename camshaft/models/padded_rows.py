"""Right-padded rows: how decoders are called whose layers cannot run on packed rows.

    if runs_padded(hf.config):
        hidden = padded_hidden_states(hf.base_model, tokens, packing)

The layers of some model families compute attention with code of their own, carry a recurrent state from token to token,
or select the tokens to attend to. `padded_hidden_states` unpacks a micro-batch into rows that are padded on the right,
calls the decoder once, and packs its hidden states again, so all code after it sees packed rows. This is exact for a
causal decoder, without a mask: no token of a row depends on the padding after it, and a recurrent state starts anew in
each row. Tokens of padding cost as much as others, so micro-batches consist of rows of similar lengths and their limits
count padding (`engine/micro_batches.py`).
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from camshaft.config.families import support
from camshaft.device import to_device
from camshaft.errors import EngineError
from camshaft.models.attention import config_values
from camshaft.models.packing import Packing


def runs_padded(config: PreTrainedConfig) -> bool:
    """Return True if models of this config are called on right-padded rows instead of packed rows."""
    return support.runs_padded(config_values(config))


def padded_hidden_states(decoder: nn.Module, tokens: Tensor, packing: Packing) -> Tensor:
    """Call `decoder` on the packed rows `tokens` (N,), unpacked into right-padded rows; return its (N, H) states."""
    if packing.prefix_of is not None:
        raise EngineError("right-padded rows do not support prefix sharing; use a Packing without prefix_of")
    rows, longest = len(packing.lengths), max(packing.lengths)
    row_ids = torch.repeat_interleave(torch.arange(rows), torch.tensor(packing.lengths))
    offsets = to_device(row_ids * longest + packing.position_ids(), tokens.device)
    ids = tokens.new_zeros(rows * longest).index_copy(0, offsets, tokens)
    hidden = decoder(input_ids=ids.view(rows, longest), use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, offsets)
