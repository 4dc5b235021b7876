"""Exact KL divergence of the actor from the reference over the whole vocabulary, for two models in one process.

    full_kl = exact_kl(actor, ref, data, temperature)                       # a column of the response tokens
    with reference_distribution(ref, temperature) as preprocess:            # an update with `full_kl` as output
        actor.update_actor(data, preprocess=preprocess)

Reads `prompts`, `responses` and `response_mask`; writes `full_kl`. The models alternate by micro-batch: before the
actor's forward pass, the reference writes its log-probs of the whole vocabulary to the column `log_q`. Memory therefore
holds the distributions of one model for one micro-batch. If the reference is the actor's model without its adapter, the
adapter is active again before the actor's forward pass and during its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from camshaft.dataproto import DataProto
from camshaft.engine import StepContext
from camshaft.engine.base import PreprocessFn
from camshaft.roles.base import EngineRole, as_sequences, of_responses


def exact_kl(actor: EngineRole, ref: EngineRole, data: DataProto, temperature: float) -> DataProto:
    """Compute `full_kl` of the responses at the sampling temperature."""
    ctx = StepContext(outputs=("full_kl",), temperature=temperature)
    with reference_distribution(ref, temperature) as preprocess, actor.engine.eval_mode():
        predictions = actor.engine.infer_batch(as_sequences(data), ctx, preprocess)
    return DataProto.from_dict({"full_kl": of_responses(predictions, "full_kl", data).to("cpu")})


@contextmanager
def reference_distribution(ref: EngineRole, temperature: float) -> Iterator[PreprocessFn]:
    """Yield a hook that adds the column `log_q` to a micro-batch; `ref` is loaded once for the whole block."""
    ref_ctx = StepContext(outputs=("distribution",), temperature=temperature)

    def add_distribution(batch: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        return batch.with_columns(log_q=ref.infer(batch, ref_ctx)["distribution"]), ctx

    with ref.engine.eval_mode():  # once for all micro-batches: loads offloaded weights only once
        yield add_distribution
