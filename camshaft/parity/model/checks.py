"""Compares an engine, and a rollout with its weights, with the plain transformers model, head by head.

    for result in check_model(Case(prepared, engine="reference"), log):
        result.check, result.status, result.sentence

The measure is the largest difference over the largest value of the same tensor.
"""

import copy
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
from camshaft.models.folders import convert_errors, reason
from camshaft.models.loader import load_config
from camshaft.parity.model.diagnosis import (
    Cause,
    Search,
    difference,
    explain_calls,
    explain_gradients,
    explain_model,
    explain_packing,
    explain_weights,
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
LABELS: dict[Head, str] = {"causal_lm": "log-probs", "value": "values", "reward": "scores"}
"""Outputs of the heads in results."""


@dataclass(frozen=True)
class Case:
    """The model, engine and rollout to compare."""

    prepared: Prepared
    engine: str = "reference"
    rollout: str = "torch"
    dtype: DType = "float64"
    device: str = "cpu"
    heads: Sequence[Head] = tuple(LABELS)
    options: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    external_lib: str | None = None
    seed: int = 0

    def build_engine(self, head: Head) -> BaseEngine:
        """Build an engine whose first update is its gradient."""
        code = {"trust_remote_code": self.trust_remote_code, "external_lib": self.external_lib}
        model = EngineModel(path=str(self.prepared.folder), head=head, new_head=head == "reward", **code)  # pyright: ignore
        optim = OptimConfig(optimizer="SGD", lr=1.0, weight_decay=0.0)
        common = {"device": self.device, "dtype": self.dtype, "seed": self.seed, "options": dict(self.options)}
        engine = build_engine(self.engine, EngineConfig(model=model, optim=optim, grad_clip=1e12, **common))  # pyright: ignore
        engine.init_model()
        return engine


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


def measure(check: str, size: float, tolerance: float, explain: Callable[[], Cause]) -> Result:
    """Return the result of a comparison. A difference above the tolerance is explained."""
    return Result(check, size, tolerance, explain() if size > tolerance else None)


def check_model(case: Case, log: Callable[[str], None]) -> Iterator[Result]:
    """Compare the model head by head, and yield each result when it is available."""
    supported, agrees = engine_class(case.engine).capabilities.heads, True
    for head in case.heads:
        if head not in supported or not agrees:
            reason = f"the engine does not support head={head}" if agrees else "the language model differs"
            yield Result(LABELS[head], skipped=f"not compared, because {reason}")
            continue
        log(f"comparing the {head} head of the engine {case.engine} in {case.dtype}")
        gc.collect()
        try:
            comparison = Comparison(case, head, log)
        except EngineError as error:
            if head == "causal_lm":
                raise
            yield Result(LABELS[head], skipped=f"not compared: {error}")
            continue
        for result in comparison.results():
            agrees = agrees and (head != "causal_lm" or result.status != "different")
            yield result


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


def counted(rows: Sequence[Tensor]) -> DataProto:
    """Return a batch of rows in which every token after the first is counted."""
    ids = Ragged.from_rows(list(rows))
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})


def rows_of(outputs: Mapping[str, Any], head: Head) -> list[Tensor]:
    """Return the output of a head for each row: of the tokens after the first, or one score."""
    output = outputs[LOSS_OUTPUT[head]].to("cpu")
    return [row[1:].double() for row in output.rows()] if isinstance(output, Ragged) else list(output[:, None].double())


# -- one head --------------------------------------------------------------------------------------


class Comparison:
    """An engine with one head, and its oracle."""

    def __init__(self, case: Case, head: Head, log: Callable[[str], None]):
        self.case, self.log, self.label = case, log, LABELS[head]
        self.head: Head = head
        self.engine = case.build_engine(head)
        self.weights, prepared = exported_weights(self.engine), case.prepared
        options: dict[str, Any] = {"trust_remote_code": True} if prepared.own_oracle else {}
        if head == "causal_lm":
            options["config"] = load_config(prepared.oracle_folder, prepared.own_oracle, {})
        self.model: Any = load_oracle(prepared.oracle_folder, head, self.weights, **options)
        self.batch = make_batch(getattr(self.model, "config", None) or self.model.base_model.config, case.seed)
        self.rows = list(self.batch.ragged("input_ids").rows())

    def results(self) -> Iterator[Result]:
        """Yield the results of all comparisons. The first that differs is the most telling one."""
        cause = exported = None
        if self.head == "causal_lm":
            cause = explain_weights(self.weights, dict(self.model.state_dict()))
            exported = None if cause is None else (cause.name, self.weights)
            yield Result("weights", cause=cause)
        expected, tolerance = self.oracle_outputs()
        single = [self.outputs([row])[0] for row in self.rows]
        size, check = difference(single, expected), f"{self.label} of single rows"
        if size > tolerance and (cause := explain_calls(self.outputs, self.rows, single, tolerance)):
            yield Result(check, size, tolerance, cause)
            return
        agrees = size <= tolerance
        yield measure(check, size, tolerance, lambda: self.explain_outputs(single, tolerance, exported))
        for result in self.compare_packed(single, tolerance):
            agrees = agrees and result.cause is None
            yield result
        if self.head == "causal_lm" and self.case.rollout != "none":
            yield from self.compare_rollout(tolerance, agrees)
        if agrees:
            yield from self.compare_gradients(tolerance)
        else:
            yield Result(f"gradients of {self.label}", skipped=f"not compared, because the {self.label} differ")

    def outputs(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the engine's outputs of rows that it packs in one call."""
        return self.predict(counted(rows))

    def predict(self, batch: DataProto) -> list[Tensor]:
        request: Any = {"outputs": (LOSS_OUTPUT[self.head],)}
        with self.engine.eval_mode():
            return rows_of(self.engine.infer_batch(batch, request), self.head)

    @torch.no_grad()
    def oracle_outputs(self) -> tuple[list[Tensor], float]:
        """Return the outputs of the oracle and the accepted difference. That of float32 is measured."""
        problem, batch = f"transformers cannot compute {type(self.model).__name__} in float64", counted(self.rows)
        with convert_errors(lambda error: f"{problem}: {reason(error)}"):
            expected = rows_of(oracle_outputs(self.model, batch, self.head), self.head)
        if self.case.dtype == "float64":
            return expected, OUTPUT_TOLERANCE
        rounded = rows_of(oracle_outputs(copy.deepcopy(self.model).float(), batch, self.head), self.head)
        return expected, max(OUTPUT_TOLERANCE, ROUNDINGS * difference(rounded, expected))

    def explain_outputs(self, single: list[Tensor], tolerance: float, exported: Any) -> Cause:
        if self.head != "causal_lm":
            evidence = (
                "The decoder is right, so the cause is the head: its weights, its bias or the token that it reads"
            )
            return Cause("head", evidence)
        return explain_model(Search(Oracle(self.model), self.rows, single, tolerance), exported, self.log)

    def compare_packed(self, single: list[Tensor], tolerance: float) -> Iterator[Result]:
        numbers = [number for number in range(len(self.rows)) if number != SHARING[1]]
        packed = self.outputs([self.rows[number] for number in numbers])
        result = measure(
            f"{self.label} of packed rows", difference(packed, [single[number] for number in numbers]), tolerance,
            lambda: explain_packing(self.outputs, self.rows, tolerance),
        )  # fmt: skip
        yield result
        masks = [mask[1:] for mask in self.batch.ragged("loss_mask").rows()]
        if self.head == "reward":
            masks = [torch.ones(1, dtype=torch.bool)] * len(self.rows)
        shared = [row[mask] for row, mask in zip(self.predict(self.batch), masks, strict=True)]
        size = difference(shared, [row[mask] for row, mask in zip(single, masks, strict=True)])
        evidence = (
            "Only rows with a common prompt differ, which the engine computes once (model.use_prefix_grouper=false "
            "turns this off)"
        )
        cause = result.cause or Cause("prompt sharing", evidence)
        yield measure(f"{self.label} of rows with a common prompt", size, tolerance, lambda: cause)

    def compare_rollout(self, tolerance: float, agrees: bool) -> Iterator[Result]:
        """Generate greedily, and compare the log-probs with the engine and the tokens with the oracle."""
        case, check = self.case, f"log-probs of the rollout {self.case.rollout} and the engine"
        self.log(f"generating with the rollout {case.rollout}")
        config = RolloutEngineConfig(
            model_path=str(case.prepared.folder),
            dtype=case.dtype,
            device=case.device,
            max_model_len=max(LENGTHS) + GREEDY_TOKENS,
            seed=case.seed,
            trust_remote_code=case.trust_remote_code,
            external_lib=case.external_lib,
        )
        prompts = Ragged.from_rows([self.rows[number] for number in GREEDY_ROWS])
        sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
        try:
            rollout = build_rollout(case.rollout, config)
            with rollout_mode(self.engine, rollout):
                out = rollout.generate_sequences(prompts, sampling, torch.arange(len(prompts)))
        except (EngineError, RolloutError) as error:
            yield Result(check, skipped=f"not compared: {error}")
            return
        responses = out.responses.to("cpu")
        complete = [torch.cat(pair) for pair in zip(prompts.rows(), responses.rows(), strict=True)]
        size = difference(out.log_probs.to("cpu").rows(), [row[-GREEDY_TOKENS:] for row in self.outputs(complete)])
        evidence = "Rollout and engine compute different models; `camshaft parity` finds the cause"
        yield measure(check, size, tolerance, lambda: Cause("rollout", evidence))
        check = "greedy tokens of the rollout and transformers"
        if not agrees:
            yield Result(check, skipped="not compared, because the log-probs differ")
            return
        with torch.no_grad():
            best: Any = oracle_outputs(self.model, counted(complete), "causal_lm")
        gaps = [
            (distribution.amax(-1) - log_probs)[-GREEDY_TOKENS:].max()
            for distribution, log_probs in zip(best["distribution"].rows(), best["log_probs"].rows(), strict=True)
        ]
        evidence = "The rollout chose a token that transformers finds less likely than another by this difference"
        yield measure(check, float(max(gaps)), tolerance, lambda: Cause("rollout", evidence))

    # -- gradients --------------------------------------------------------------------------------

    def compare_gradients(self, tolerance: float) -> Iterator[Result]:
        self.log("computing gradients")
        request = StepContext()
        if self.head == "causal_lm":
            request = StepContext(outputs=("log_probs", "entropy"), temperature=TEMPERATURE)
        tolerance = GRADIENT_TOLERANCE if self.case.dtype == "float64" else 10 * tolerance
        wanted_loss, _, gradients = oracle_step(self.model, self.batch, self.head, request)
        rounding = weight_rounding(self.engine)
        loss, actual = self.step(request)
        size = abs(loss - wanted_loss) / max(abs(wanted_loss), NEGLIGIBLE)
        evidence = "The outputs agree, so counts, masks or the order of the rows differ"
        yield measure(f"loss of {self.label}", size, tolerance, lambda: Cause("loss", evidence))
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        # Decays of linear attention are in float32 in transformers, whose rounding is that of larger terms.
        shared_rounding = torch.finfo(torch.float32).eps * largest
        expected = {
            name: gradient.double()
            for name, gradient in gradients.items()
            if float(gradient.abs().max()) > NEGLIGIBLE * largest and name in actual
        }
        sizes = {
            name: difference([actual[name]], [wanted]) - (rounding[name] + shared_rounding) / float(wanted.abs().max())
            for name, wanted in expected.items()
        }
        wrong = {name: expected[name] for name, size in sizes.items() if size > tolerance}
        yield measure(
            f"gradients of {self.label}", max(0.0, *sizes.values()), tolerance,
            lambda: explain_gradients(actual, wrong, self.untied_gradients(request), tolerance),
        )  # fmt: skip

    def step(self, request: StepContext) -> tuple[float, dict[str, Tensor]]:
        """Return the loss of the contract and the gradients, which are the update of a step with learning rate 1."""

        def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
            tokens, sequences = loss_sums(predictions, data, self.head)
            ctx["metrics"] = {}
            return tokens / ctx["num_tokens"] + sequences / ctx["num_sequences"], ctx

        with self.engine.train_mode():
            result = self.engine.train_batch(self.batch, request, loss_fn)
        after = exported_weights(self.engine)
        return result.loss, {name: weight - after[name] for name, weight in self.weights.items()}

    def untied_gradients(self, request: StepContext) -> dict[str, Tensor]:
        """Return the gradients of a tied embedding as if it were not tied; empty if it is not tied."""
        if self.head != "causal_lm":
            return {}
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is None or head.weight is not embedding.weight:
            return {}
        name = next(name for name, parameter in self.model.named_parameters() if parameter is embedding.weight)
        with Oracle(self.model).variant(Change(weight=lambda old, name: old[name])) as untied:
            return {name: oracle_step(untied, self.batch, self.head, request)[2][name]}


def exported_weights(engine: BaseEngine) -> dict[str, Tensor]:
    """Return copies of the weights of an engine, in float64."""
    with engine.eval_mode():
        return {name: weight.detach().cpu().double().clone() for name, weight in engine.named_weights()}


def weight_rounding(engine: BaseEngine) -> dict[str, float]:
    """Return the rounding error of each weight, and so of its update. Some families have float32 weights in float64."""
    with engine.eval_mode():
        weights = {name: weight for name, weight in engine.named_weights() if weight.is_floating_point()}
        return {name: torch.finfo(weight.dtype).eps * float(weight.abs().max()) for name, weight in weights.items()}
