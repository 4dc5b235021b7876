"""How far the actor is from the reference over the whole vocabulary, where both are in one process.

    full_kl = exact_kl(actor, ref, data, temperature)          # a column of the response tokens

Reads `prompts`, `responses`, `response_mask`; writes `full_kl`. The two models take turns, micro-batch by
micro-batch, so that the distributions of no more than one exist at a time: twice its tokens times the vocabulary.
"""

from __future__ import annotations

from typing import Any

from camshaft.algorithms import full_kl
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import StepContext
from camshaft.roles.base import EngineRole, as_sequences, of_responses

WANTED = "distribution"


def exact_kl(actor: EngineRole, ref: EngineRole, data: DataProto, temperature: float) -> DataProto:
    """`full_kl` of the responses, at the temperature they were sampled with."""
    asked = StepContext(outputs=(WANTED,), temperature=temperature)
    of_reference: list[Ragged] = []

    def ask_reference(batch: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        of_reference[:] = [ref.infer(batch, asked)[WANTED]]
        return batch, ctx

    def compare(predictions: Any, ctx: StepContext) -> tuple[Any, StepContext]:
        ours, theirs = predictions[WANTED], of_reference.pop()
        return {"full_kl": ours.like(full_kl(ours.values, theirs.values))}, ctx

    with actor.engine.eval_mode():
        found = actor.engine.infer_batch(as_sequences(data), asked, ask_reference, compare)
    return DataProto.from_dict({"full_kl": of_responses(found, "full_kl", data).to("cpu")})
