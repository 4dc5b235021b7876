"""Where the score of a whole response stands: on its last token that counts.

    token_level_scores = on_last_token(scores, batch.ragged("response_mask"))

One convention for scoring functions (`manager.py`) and reward models (`roles/reward_model.py`), whose scores add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from camshaft.dataproto import Ragged


def on_last_token(scores: Tensor, chosen: Ragged) -> Ragged:
    """Each row's score on its last token that counts; a row without one has no place for it."""
    counted = chosen.values.nonzero().squeeze(-1).cpu()
    rows = chosen.row_ids()[counted].cpu()
    ends = torch.ones(len(counted), dtype=torch.bool)
    ends[:-1] = rows[1:] != rows[:-1]  # the last counted token before those of another row
    values = torch.zeros(len(chosen.values), dtype=torch.float32)
    values[counted[ends]] = scores[rows[ends]]
    return chosen.like(values.to(chosen.values.device))
