"""Exact KL divergence from actor to reference over the vocabulary, for two models in the same process.

    full_kl = exact_kl(actor, ref, data, temperature)                       # column `full_kl` of the responses
    with reference_distribution(ref, temperature) as preprocess:            # update whose loss uses `full_kl`
        actor.engine.train_batch(mini_batch, ctx, loss, preprocess)

`exact_kl` reads the columns `prompts`, `responses` and `response_mask`, and writes `full_kl`. The two models alternate
for each micro-batch: before the forward pass of the actor, the reference computes its log-probs over the vocabulary as
column `log_q`. Only the distributions of one micro-batch are therefore in memory. If the reference is the actor without
its LoRA adapter, the adapter is enabled again before the forward pass of the actor.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from camshaft.dataproto import DataProto
from camshaft.engine import StepContext
from camshaft.engine.base import PreprocessFn
from camshaft.roles.base import EngineRole, as_sequences, select_responses
from camshaft.roles.sequences import SEQUENCES, whole_rows


def exact_kl(actor: EngineRole, ref: EngineRole, data: DataProto, temperature: float) -> DataProto:
    """Compute the column `full_kl` of the responses at the sampling temperature."""
    ctx = StepContext(outputs=("full_kl",), temperature=temperature)
    with reference_distribution(ref, temperature) as preprocess, actor.engine.eval_mode():
        predictions = actor.engine.infer_batch(as_sequences(data), ctx, preprocess)
    predictions = whole_rows(predictions, data) if SEQUENCES in data else predictions
    return DataProto.from_dict({"full_kl": select_responses(predictions, "full_kl", data).to("cpu")})


@contextmanager
def reference_distribution(ref: EngineRole, temperature: float) -> Iterator[PreprocessFn]:
    """Yield a preprocess hook that adds the column `log_q` of the reference to a micro-batch."""
    ref_ctx = StepContext(outputs=("distribution",), temperature=temperature)

    def add_distribution(batch: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        return batch.with_columns(log_q=ref.infer(batch, ref_ctx)["distribution"]), ctx

    with ref.engine.eval_mode():  # loads offloaded weights once for all micro-batches
        yield add_distribution
