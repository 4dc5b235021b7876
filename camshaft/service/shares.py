"""The rows of a command, split over the ranks of a model.

    shares = Shares.of(rows, seats)
    outputs = role.call_ranks("forward_backward", model_id, PerRank(shares.parts), ...)
    log_probs, loss = shares.merge(outputs)              # in the order of the rows

Losses are sums over tokens, so ranks may have different numbers of rows, and get about the same number of tokens. The
split is a function of the lengths. Ranks with the same data-parallel rank get the same rows. All ranks of an engine
run together, and each needs a row: if there are fewer, a rank gets one of which no token counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from camshaft.algorithms.partition import karmarkar_karp
from camshaft.dataproto import DataProto, Ragged
from camshaft.seat import Seat


@dataclass(frozen=True)
class Shares:
    """The rows of each rank. Their numbers in the command are `numbers` in the meta information."""

    parts: list[DataProto]
    seats: Sequence[Seat]

    @staticmethod
    def of(rows: DataProto, seats: Sequence[Seat]) -> "Shares":
        lengths: list[int] = rows.ragged("input_ids").lengths.tolist()
        dp_size = seats[0].dp_size
        groups = karmarkar_karp(lengths, dp_size) if dp_size > 1 else [list(range(len(rows)))]
        parts = [_select(rows, numbers) for numbers in groups]
        return Shares([parts[seat.dp_rank] for seat in seats], seats)

    def merge(self, outputs: Sequence[DataProto]) -> tuple[Ragged, float]:
        """Return the log-probs of all rows, and the sum of the losses."""
        collected = sorted((seat.dp_rank, seat.rank) for seat in self.seats if seat.collects)
        numbers, log_probs, loss = list[int](), list[Ragged](), 0.0
        for _, rank in collected:
            own, output = self.parts[rank].meta_info["numbers"], outputs[rank]
            numbers += own
            log_probs.append(output.ragged("log_probs").select(slice(0, len(own))))
            loss += output.meta_info["loss"]
        return Ragged.concat(log_probs).select(torch.tensor(numbers).argsort()), loss


def _select(rows: DataProto, numbers: list[int]) -> DataProto:
    if numbers:
        return rows.reorder(numbers).with_meta(numbers=numbers)
    shortest = rows.reorder([int(rows.ragged("input_ids").lengths.argmin())])
    mask = shortest.ragged("loss_mask").map(torch.zeros_like)
    return shortest.with_columns(loss_mask=mask).with_meta(numbers=numbers)
