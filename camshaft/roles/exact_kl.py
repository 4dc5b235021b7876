"""How far the actor is from the reference over the whole vocabulary, where both are in one process.

    full_kl = exact_kl(actor, ref, data, temperature)          # a column of the response tokens
    with compared(ref, temperature) as before:                 # in an update: `full_kl` of each micro-batch
        actor.update_actor(data, before=before)

Reads `prompts`, `responses`, `response_mask`; writes `full_kl`. The two models take turns, micro-batch by
micro-batch: the reference says what it makes of the tokens, in the column `log_q`, before the actor looks at them. So
the distributions of one model exist, for the tokens of one micro-batch of the actor. Where the reference is the model
under the actor's adapter, the adapter is on again before the actor's forward pass, and on in its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from camshaft.dataproto import DataProto
from camshaft.engine import StepContext
from camshaft.engine.base import PreprocessFn
from camshaft.roles.base import EngineRole, as_sequences, of_responses


def exact_kl(actor: EngineRole, ref: EngineRole, data: DataProto, temperature: float) -> DataProto:
    """`full_kl` of the responses, at the temperature they were sampled with."""
    wanted = StepContext(outputs=("full_kl",), temperature=temperature)
    with compared(ref, temperature) as before, actor.engine.eval_mode():
        found = actor.engine.infer_batch(as_sequences(data), wanted, before)
    return DataProto.from_dict({"full_kl": of_responses(found, "full_kl", data).to("cpu")})


@contextmanager
def compared(ref: EngineRole, temperature: float) -> Iterator[PreprocessFn]:
    """What gives micro-batches the column that an engine's `full_kl` is measured from; inside, `ref` is at hand."""
    asked = StepContext(outputs=("distribution",), temperature=temperature)

    def ask_reference(batch: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        return batch.with_columns(log_q=ref.infer(batch, asked)["distribution"]), ctx

    with ref.engine.eval_mode():  # for all micro-batches: what rests in host memory comes once
        yield ask_reference
