"""Placement of sequence scores: on the last token of the response mask.

    token_level_scores = on_last_token(scores, batch.ragged("response_mask"))

Used for scoring functions (`manager.py`) and reward models (`roles/reward_model.py`), so that their scores add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from camshaft.dataproto import Ragged


def on_last_token(scores: Tensor, chosen: Ragged) -> Ragged:
    """Put each row's score (B,) on its last masked-in token; rows without such a token get no score."""
    counted = chosen.values.nonzero().squeeze(-1).cpu()
    rows = chosen.row_ids()[counted].cpu()
    ends = torch.ones(len(counted), dtype=torch.bool)
    ends[:-1] = rows[1:] != rows[:-1]  # True at the last counted token of a row
    values = torch.zeros(len(chosen.values), dtype=torch.float32)
    values[counted[ends]] = scores[rows[ends]]
    return chosen.like(values.to(chosen.values.device))
