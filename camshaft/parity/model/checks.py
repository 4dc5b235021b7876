"""Compares an engine, and a rollout with its weights, with the plain transformers model.

    for result in check_model(Case(prepared, engine="reference"), log):
        result.check, result.status, result.sentence

The measure is the largest difference over the largest value of the same tensor.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from camshaft.config import EngineConfig, EngineModel, OptimConfig, RolloutEngineConfig
from camshaft.config.engine import DType, Head
from camshaft.contracts.engine.oracle import LOSS_OUTPUT, load_oracle, loss_sums, oracle_outputs, oracle_step
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine, StepContext, build_engine, engine_class
from camshaft.errors import EngineError, RolloutError
from camshaft.parity.model.diagnosis import (
    Cause,
    Search,
    depends_on_earlier_calls,
    diagnose_gradients,
    diagnose_model,
    diagnose_packing,
    diagnose_weights,
    difference,
)
from camshaft.parity.model.folders import Prepared
from camshaft.parity.model.oracle import Change, Oracle
from camshaft.reshard import rollout_mode
from camshaft.rollout import SamplingParams, build_rollout

LENGTHS = (2, 2, 3, 9, 17, 24, 24, 31, 6, 12)
"""Lengths of the rows."""
PROMPT, SHARING = 12, (5, 6)
"""Length of a common prompt, and the numbers of the rows that begin with it."""
GREEDY_TOKENS, GREEDY_ROWS = 16, (0, 3, 4, 8)
TEMPERATURE = 0.7
"""Temperature of the gradients."""
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 5e-6
"""Accepted differences in float64. transformers computes norms and routers of float64 models in float32."""
ROUNDINGS = 8
"""Accepted difference in float32, as a multiple of the difference between transformers in float32 and in float64."""
NEGLIGIBLE = 1e-12
"""Gradients below this fraction of the largest are not compared."""
HEADS: tuple[Head, ...] = ("causal_lm", "value", "reward")


@dataclass(frozen=True)
class Case:
    """The model, engine and rollout to compare."""

    prepared: Prepared
    engine: str = "reference"
    rollout: str = "torch"
    dtype: DType = "float64"
    device: str = "cpu"
    heads: tuple[Head, ...] = HEADS
    options: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    external_lib: str | None = None
    seed: int = 0

    def engine_config(self, head: Head) -> EngineConfig:
        """Return the config of an engine whose first update is its gradient."""
        model = EngineModel(
            path=str(self.prepared.folder),
            head=head,
            new_head=head == "reward",
            trust_remote_code=self.trust_remote_code,
            external_lib=self.external_lib,
        )
        optim = OptimConfig(optimizer="SGD", lr=1.0, weight_decay=0.0)
        return EngineConfig(
            model=model,
            optim=optim,
            grad_clip=1e12,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            options=dict(self.options),
        )


@dataclass(frozen=True)
class Result:
    """Result of one comparison."""

    check: str
    difference: float | None = None
    tolerance: float | None = None
    cause: Cause | None = None
    skipped: str = ""
    """Reason that nothing was compared."""

    @property
    def status(self) -> Literal["equal", "different", "skipped"]:
        if self.skipped:
            return "skipped"
        return "equal" if self.cause is None else "different"

    @property
    def sentence(self) -> str:
        """The finding with the figure, the tolerance and the likely cause, or the reason that nothing was compared."""
        if self.cause is None:
            return f"{self.check}: {self.skipped}" if self.skipped else ""
        figure = "" if self.difference is None else f" by {self.difference:.1e} (tolerance {self.tolerance:.0e})"
        return f"{self.check}: differ{figure}. Likely cause: {self.cause.name}. {self.cause.evidence}."


def check_model(case: Case, log: Callable[[str], None]) -> Iterator[Result]:
    """Compare the model head by head, and yield each result when it is available."""
    supported = engine_class(case.engine).capabilities.heads
    agrees = True
    for head in case.heads:
        if head not in supported:
            yield Result(f"{head}: outputs", skipped=f"the engine does not support head={head}")
        elif head == "causal_lm":
            for result in _LanguageModel(case, log).results():
                agrees = agrees and result.status != "different"
                yield result
        elif agrees:
            log(f"comparing the {head} head")
            yield from _check_head(case, head)
        else:
            yield Result(f"{head}: outputs", skipped="not compared, because the language model differs")


# -- rows ------------------------------------------------------------------------------------------


def make_batch(config: Any, seed: int) -> DataProto:
    """Return ten rows with advantages. Two share a prompt, one has a hole in its mask, and one no counted token."""
    text, random = config.get_text_config(), torch.Generator().manual_seed(seed)
    special = {value for key, value in text.to_dict().items() if key.endswith("_token_id") and isinstance(value, int)}
    allowed = torch.tensor([token for token in range(min(text.vocab_size, 50_000)) if token not in special])
    longest = getattr(text, "max_position_embeddings", None) or max(LENGTHS)
    rows = [allowed[torch.randint(len(allowed), (min(length, longest),), generator=random)] for length in LENGTHS]
    rows[SHARING[1]][:PROMPT] = rows[SHARING[0]][:PROMPT]
    masks = [torch.arange(len(row)) > 0 for row in rows]
    for number in SHARING:
        masks[number][:PROMPT] = False
    masks[7][5:9] = False
    masks[8][:] = False
    advantages = [torch.randn(len(row), generator=random) for row in rows]
    columns = {"input_ids": rows, "loss_mask": masks, "advantages": advantages}
    return DataProto.from_dict({name: Ragged.from_rows(parts) for name, parts in columns.items()})


def _counted(rows: Sequence[Tensor]) -> DataProto:
    """Return a batch of rows in which every token after the first is counted."""
    ids = Ragged.from_rows(list(rows))
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})


# -- the language model ----------------------------------------------------------------------------


class _LanguageModel:
    """An engine with a language-model head, and its oracle."""

    def __init__(self, case: Case, log: Callable[[str], None]):
        self._case, self._log = case, log
        log(f"building the engine {case.engine} in {case.dtype}")
        self._engine = build_engine(case.engine, case.engine_config("causal_lm"))
        self._engine.init_model()
        log("building the oracle in float64")
        prepared = case.prepared
        self._oracle = Oracle(prepared.oracle_folder, trust_remote_code=prepared.own_oracle)
        self._batch = make_batch(self._oracle.config, case.seed)
        self._rows = list(self._batch.ragged("input_ids").rows())

    def results(self) -> Iterator[Result]:
        """Yield the results of all comparisons."""
        weights = _weights(self._engine)
        weight_cause = diagnose_weights(weights, self._oracle.weights)
        yield Result("weights", cause=weight_cause)
        self._log("computing log-probs, one row at a time")
        expected = self._oracle.log_probs(self._rows)
        single = [self._log_probs([row])[0] for row in self._rows]
        tolerance, gradient_tolerance = _tolerances(self._case.dtype, self._oracle, self._rows, expected)
        size, check, cause = difference(single, expected), "log-probs of single rows", None
        if size > tolerance:
            change = depends_on_earlier_calls(self._log_probs, self._rows, single)
            if change > tolerance:
                evidence = f"The log-probs of a row change by {change:.1e} with the rows of earlier calls"
                yield Result(check, size, tolerance, Cause("state that leaks between rows", evidence))
                return
            exported = None if weight_cause is None else (weight_cause.name, weights)
            search = Search(self._oracle, self._rows, single, tolerance)
            cause = diagnose_model(search, exported, self._log)
        yield Result(check, size, tolerance, cause)
        is_equal = cause is None
        for result in self._compare_packed(single, tolerance):
            is_equal = is_equal and result.cause is None
            yield result
        yield from self._compare_rollout(tolerance, is_equal)
        if is_equal:
            self._log("computing gradients")
            yield from self._compare_gradients(gradient_tolerance)
        else:
            yield Result("gradients", skipped="not compared, because the log-probs differ")

    def _log_probs(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the engine's log-probs of the tokens after the first, of rows that it packs in one call."""
        return [row[1:] for row in _predict(self._engine, _counted(rows), "log_probs").rows()]

    def _compare_packed(self, single: list[Tensor], tolerance: float) -> Iterator[Result]:
        self._log("computing log-probs of packed rows")
        numbers = [number for number in range(len(self._rows)) if number != SHARING[1]]
        packed = self._log_probs([self._rows[number] for number in numbers])
        size, cause = difference(packed, [single[number] for number in numbers]), None
        if size > tolerance:
            cause = diagnose_packing(self._log_probs, self._rows, tolerance)
        yield Result("packed rows and single rows", size, tolerance, cause)
        masks = [mask[1:] for mask in self._batch.ragged("loss_mask").rows()]
        shared = [row[1:] for row in _predict(self._engine, self._batch, "log_probs").rows()]
        size = difference(
            [row[mask] for row, mask in zip(shared, masks, strict=True)],
            [row[mask] for row, mask in zip(single, masks, strict=True)],
        )
        if size > tolerance and cause is None:
            evidence = (
                "Only rows with a common prompt differ, which the engine computes once (model.use_prefix_grouper=false "
                "turns this off)"
            )
            cause = Cause("prompt sharing", evidence)
        yield Result("rows with a common prompt", size, tolerance, cause if size > tolerance else None)

    def _compare_rollout(self, tolerance: float, is_equal: bool) -> Iterator[Result]:
        """Generate greedily, and compare the log-probs with the engine and the tokens with the oracle."""
        case, check = self._case, f"log-probs of the rollout {self._case.rollout} and the engine"
        if case.rollout == "none":
            return
        self._log(f"generating with the rollout {case.rollout}")
        config = RolloutEngineConfig(
            model_path=str(case.prepared.folder),
            dtype=case.dtype,
            device=case.device,
            max_model_len=max(LENGTHS) + GREEDY_TOKENS,
            seed=case.seed,
            trust_remote_code=case.trust_remote_code,
            external_lib=case.external_lib,
        )
        prompts = Ragged.from_rows([self._rows[number] for number in GREEDY_ROWS])
        sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
        try:
            rollout = build_rollout(case.rollout, config)
            with rollout_mode(self._engine, rollout):
                out = rollout.generate_sequences(prompts, sampling, torch.arange(len(prompts)))
        except (EngineError, RolloutError) as error:
            yield Result(check, skipped=f"not compared: {error}")
            return
        responses = out.responses.to("cpu")
        complete = [torch.cat(pair) for pair in zip(prompts.rows(), responses.rows(), strict=True)]
        engine = [row[-GREEDY_TOKENS:] for row in self._log_probs(complete)]
        size = difference([row.double() for row in out.log_probs.to("cpu").rows()], engine)
        evidence = "Rollout and engine compute different models; `camshaft parity` finds the cause"
        yield Result(check, size, tolerance, Cause("rollout", evidence) if size > tolerance else None)
        check = "greedy tokens of the rollout and transformers"
        if not is_equal:
            yield Result(check, skipped="not compared, because the log-probs differ")
            return
        gaps = self._oracle.greedy_gaps(complete, GREEDY_TOKENS)
        size = max(float(gap.max()) for gap in gaps)
        evidence = "The rollout chose a token that transformers finds less likely than another by this difference"
        yield Result(check, size, tolerance, Cause("rollout", evidence) if size > tolerance else None)

    def _compare_gradients(self, tolerance: float) -> Iterator[Result]:
        request = StepContext(outputs=("log_probs", "entropy"), temperature=TEMPERATURE)
        loss, _, expected = oracle_step(self._oracle.model, self._batch, "causal_lm", request)
        actual_loss, actual = _step(self._engine, self._batch, "causal_lm", request)
        yield _loss_result("loss", actual_loss, loss, tolerance)
        rounding, untied = _update_rounding(self._engine), self._untied_gradients(request)
        yield _gradient_result("gradients", actual, expected, tolerance, rounding, untied)

    def _untied_gradients(self, request: StepContext) -> dict[str, Tensor]:
        """Return the gradients of a tied embedding as if it were not tied; empty if it is not tied."""
        model = self._oracle.model
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is None or head.weight is not embedding.weight:
            return {}
        name = next(name for name, parameter in model.named_parameters() if parameter is embedding.weight)
        with self._oracle.variant(Change("", "", weights=dict)) as untied:
            gradients = oracle_step(untied, self._batch, "causal_lm", request)[2]
        return {name: gradients[name]}


# -- value and reward heads ------------------------------------------------------------------------


def _check_head(case: Case, head: Head) -> Iterator[Result]:
    """Compare the outputs and gradients of a value or reward head."""
    output, check = LOSS_OUTPUT[head], f"{head} head"
    gc.collect()
    try:
        engine = build_engine(case.engine, case.engine_config(head))
        engine.init_model()
    except EngineError as error:
        yield Result(check, skipped=f"not compared: {error}")
        return
    prepared = case.prepared
    options = {"trust_remote_code": True} if prepared.own_oracle else {}
    oracle: Any = load_oracle(prepared.oracle_folder, head, _weights(engine), **options)
    batch = make_batch(oracle.base_model.config, case.seed)
    with torch.no_grad():
        expected = _values(oracle_outputs(oracle, batch, head)[output])
    actual = _values(_predict(engine, batch, output))
    tolerance = OUTPUT_TOLERANCE if case.dtype == "float64" else 100 * torch.finfo(torch.float32).eps
    size = difference([actual], [expected])
    evidence = "The decoder is right, so the cause is the head: its weights, its bias or the token that it reads"
    yield Result(f"{check}: {output}", size, tolerance, Cause("head", evidence) if size > tolerance else None)
    if size <= tolerance:
        loss, _, gradients = oracle_step(oracle, batch, head)
        actual_loss, actual_gradients = _step(engine, batch, head, StepContext())
        yield _loss_result(f"{check}: loss", actual_loss, loss, tolerance)
        gradient_tolerance = tolerance * GRADIENT_TOLERANCE / OUTPUT_TOLERANCE
        rounding = _update_rounding(engine)
        yield _gradient_result(f"{check}: gradients", actual_gradients, gradients, gradient_tolerance, rounding, {})


# -- steps -----------------------------------------------------------------------------------------


def _weights(engine: BaseEngine) -> dict[str, Tensor]:
    with engine.eval_mode():
        return {name: weight.detach().cpu().double().clone() for name, weight in engine.named_weights()}


def _predict(engine: BaseEngine, batch: DataProto, output: Any) -> Any:
    with engine.eval_mode():
        predictions: Any = engine.infer_batch(batch, StepContext(outputs=(output,)))
    prediction = predictions[output].to("cpu")
    return prediction.map(Tensor.double) if isinstance(prediction, Ragged) else prediction.double()


def _values(prediction: Ragged | Tensor) -> Tensor:
    return (prediction.values if isinstance(prediction, Ragged) else prediction).double()


def _step(engine: BaseEngine, batch: DataProto, head: Head, request: StepContext) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of the contract and the gradients, which are the update of a step with learning rate 1."""

    def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        tokens, sequences = loss_sums(predictions, data, head)
        ctx["metrics"] = {}
        return tokens / ctx["num_tokens"] + sequences / ctx["num_sequences"], ctx

    before = _weights(engine)
    with engine.train_mode():
        result = engine.train_batch(batch, request, loss_fn)
    return result.loss, {name: before[name] - weight for name, weight in _weights(engine).items()}


def _update_rounding(engine: BaseEngine) -> dict[str, float]:
    """Return the rounding error of each weight, and so of its update."""
    with engine.eval_mode():
        return {
            n: torch.finfo(w.dtype).eps * float(w.abs().max())
            for n, w in engine.named_weights()
            if w.is_floating_point()
        }


def _tolerances(dtype: str, oracle: Oracle, rows: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Return the accepted differences of outputs and gradients. Those of float32 are measured."""
    if dtype == "float64":
        return OUTPUT_TOLERANCE, GRADIENT_TOLERANCE
    output = max(OUTPUT_TOLERANCE, ROUNDINGS * difference(oracle.in_float32(rows), expected))
    return output, 10 * output


def _loss_result(check: str, actual: float, expected: float, tolerance: float) -> Result:
    size = abs(actual - expected) / max(abs(expected), NEGLIGIBLE)
    evidence = "The outputs agree, so counts, masks or the order of the rows differ"
    return Result(check, size, tolerance, Cause("loss", evidence) if size > tolerance else None)


def _gradient_result(
    check: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    rounding: Mapping[str, float],
    untied: Mapping[str, Tensor],
) -> Result:
    """Compare gradients. Some families have float32 weights in a float64 model, whose updates are rounded."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    compared = {
        name: gradient.double()
        for name, gradient in expected.items()
        if float(gradient.abs().max()) > NEGLIGIBLE * largest and name in actual
    }
    sizes = {
        name: difference([actual[name].flatten()], [wanted.flatten()]) - rounding[name] / float(wanted.abs().max())
        for name, wanted in compared.items()
    }
    size, wrong = max(0.0, *sizes.values()), {name: compared[name] for name in sizes if sizes[name] > tolerance}
    cause = diagnose_gradients(actual, wrong, untied, tolerance) if wrong else None
    return Result(check, size, tolerance, cause)
