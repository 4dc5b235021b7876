"""The contract of `BaseEngine`: rules that any engine can be checked against.

    camshaft check-engine my_pkg.my_engine:MyEngine          # prints a table of verdicts
    for verdict in check_engine(MyEngine, folder): ...       # in a program

Results are compared with those of an oracle: `transformers` on one row at a time (`oracle.py`). Engines need not expose
gradients, because gradients are computed from weight updates. With eps=1, no weight decay and no clipping, the first
update of AdamW is lr * g / (|g| + 1), which is solved for g. Tolerances are multiples of the rounding error of the
oracle (`harness.measure_tolerances`).

A rule is a function that takes an `EngineHarness`. Its docstring states the requirement, and its name appears in
reports. This file contains the rules about predictions, steps and modes. Rules about checkpoints are in
`checkpoints.py`, rules about adapters in `adapters.py`, the one about hyperparameters of a step in
`hyperparameters.py`, the one about missing calls in `missing_calls.py`, the one about free targets in `targets.py`, and
rules about the exact KL divergence in `exact_kl.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine import checkpoints
from camshaft.contracts.engine.adapters import adapter, adapter_groups
from camshaft.contracts.engine.exact_kl import exact_kl, inference_within_a_step
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.contracts.engine.hyperparameters import hyperparameters_of_a_step
from camshaft.contracts.engine.missing_calls import errors_name_the_missing_call
from camshaft.contracts.engine.oracle import oracle_outputs, oracle_step
from camshaft.contracts.engine.targets import free_targets
from camshaft.contracts.rules import Rule, Verdict, expect, expect_error, find_problem, make_rules, run_rules
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.base import BaseEngine
from camshaft.engine.context import StepContext
from camshaft.errors import EngineError
from camshaft.models.heads import OUTPUTS


def interface(harness: EngineHarness) -> None:
    """The class implements every member of BaseEngine, with the specified signatures."""
    engine_class = harness.engine_class
    missing = sorted(getattr(engine_class, "__abstractmethods__", ()))
    expect(not missing, f"{engine_class.__name__} does not implement {', '.join(missing)}")
    engine_class(harness.config())
    for name, member in vars(BaseEngine).items():
        if not inspect.isfunction(member) or name.startswith("_"):
            continue
        specified, actual = inspect.signature(member), inspect.signature(getattr(engine_class, name))
        required = {n: p.default for n, p in specified.parameters.items()}
        if not engine_class.capabilities.supports_step_hyperparameters:
            required.pop("hyperparameters", None)
        accepted = {n: p.default for n, p in actual.parameters.items()}
        expect(
            required.items() <= accepted.items(),
            f"{name}{actual} does not accept all arguments of BaseEngine.{name}{specified}",
        )


def predictions(harness: EngineHarness) -> None:
    """Each output of each head equals that of transformers on one row at a time, and is zero outside loss_mask."""
    for head in harness.heads(*OUTPUTS):
        outputs = harness.outputs(head)
        engine = harness.build(head=head)
        result = harness.infer(engine, StepContext(outputs=outputs, temperature=0.7))
        expected = oracle_outputs(harness.oracle_model(engine, head), harness.batch, head, temperature=0.7)
        expect(set(result) == set(outputs), f"a {head} engine returned {sorted(result)} for a request of {outputs}")
        for name in outputs:
            expect_close(result[name], expected[name], harness.tolerance, f"{name} of a {head} engine")


def order_of_rows(harness: EngineHarness) -> None:
    """Predictions are returned in the order of the rows, for any micro-batch size and any token budget."""
    engine = harness.build()
    with engine.eval_mode():
        expected = engine.infer_batch(harness.batch)["log_probs"]
    for limits in harness.micro_batch_limits():
        split = harness.build(**{f"infer_{name}": value for name, value in limits.items()})
        with split.eval_mode():
            log_probs = split.infer_batch(harness.batch)["log_probs"]
            expect_close(log_probs, expected, harness.tolerance, f"log_probs with {limits}")
            row_log_probs = split.infer_batch(harness.batch.reorder([3]))["log_probs"]
        expect_close(
            row_log_probs, expected.select([3]), harness.tolerance, f"log_probs of a batch of one row with {limits}"
        )


def token_budget_is_hard(harness: EngineHarness) -> None:
    """No micro-batch has more than `max_tokens` tokens. A longer row raises an error."""
    budget = int(harness.batch["input_ids"].lengths.max()) + 2
    sizes: list[int] = []

    def record(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        sizes.append(len(data["input_ids"].values))
        return data, ctx

    engine = harness.build(max_tokens=budget, infer_max_tokens=budget)
    with engine.train_mode():
        engine.forward_backward_step(harness.batch, preprocess_fn=record)
    expect(len(sizes) > 1 and max(sizes) <= budget, f"with max_tokens={budget} the micro-batches have {sizes} tokens")
    engine = harness.build(max_tokens=budget - 3)
    with engine.train_mode():
        expect_error(
            lambda: engine.forward_backward_step(harness.batch),
            str(budget - 3),
            "forward_backward_step accepted a row with more tokens than max_tokens",
        )


def hooks(harness: EngineHarness) -> None:
    """preprocess_fn runs once per micro-batch before the model, and postprocess_fn after it, with the keys that
    preprocess_fn added to ctx. The engine returns the predictions of postprocess_fn, which are Ragged (one value per
    token), or tensors or lists (one value per row)."""
    calls: list[str] = []

    def record_preprocess(data: DataProto, ctx: Any) -> tuple[DataProto, Any]:
        ctx["number"], ctx["rows"] = sum(call.startswith("before") for call in calls), len(data)
        calls.append(f"before {ctx['number']}, {ctx['rows']} rows")
        return data, ctx

    def record_postprocess(outputs: Any, ctx: Any) -> tuple[Any, Any]:
        calls.append(f"after {ctx['number']}, {ctx['rows']} rows")
        log_probs = outputs["log_probs"]
        lengths = log_probs.lengths.tolist()
        doubled = log_probs.map(lambda v: 2 * v)
        return {"doubled": doubled, "lengths": log_probs.lengths, "texts": [f"{n} tokens" for n in lengths]}, ctx

    engine = harness.build(infer_micro_batch_size=2)
    with engine.eval_mode():
        log_probs = engine.infer_batch(harness.batch)["log_probs"]
        result, _ = engine.forward_backward_step(
            harness.batch, forward_only=True, preprocess_fn=record_preprocess, postprocess_fn=record_postprocess
        )
        expect_error(
            lambda: engine.infer_batch(harness.batch, postprocess_fn=lambda outputs, ctx: ({"mean": 0.5}, ctx)),
            "mean", "infer_batch accepted a prediction without a value per row",
        )  # fmt: skip
    # A pipeline may call preprocess_fn for several micro-batches before the first postprocess_fn.
    numbers = range(len(harness.batch) // 2)
    for when in ("before", "after"):
        in_order = [call for call in calls if call.startswith(when)]
        expect(in_order == [f"{when} {number}, 2 rows" for number in numbers], f"hooks ran as {calls}")
    first = [calls.index(f"before {n}, 2 rows") < calls.index(f"after {n}, 2 rows") for n in numbers]
    expect(all(first), f"hooks ran as {calls}")
    names = sorted(result)
    expect(names == ["doubled", "lengths", "texts"], f"postprocess_fn returned doubled, lengths, texts; got {names}")
    expect_close(result["doubled"], log_probs.map(lambda v: 2 * v), 0.0, "a Ragged prediction of postprocess_fn")
    lengths = log_probs.lengths.tolist()
    expect(
        list(result["lengths"]) == lengths,
        f"postprocess_fn returned a tensor with the values {lengths}; got {result['lengths']}",
    )
    texts = [f"{n} tokens" for n in lengths]
    expect(list(result["texts"]) == texts, f"postprocess_fn returned the list {texts}; got {result['texts']}")


def raw_batches(harness: EngineHarness) -> None:
    """A batch without input_ids is first passed to preprocess_fn. If there is no preprocess_fn, or it does not return a
    batch, an error describes the expected batch."""
    engine = harness.build(infer_micro_batch_size=3)
    names = [f"row {number}" for number in range(len(harness.batch))]

    def encode(raw: Any, ctx: StepContext) -> tuple[DataProto, StepContext]:
        return harness.batch.reorder([names.index(name) for name in raw["texts"]]), ctx

    with engine.eval_mode():
        expected = engine.infer_batch(harness.batch)["log_probs"]
        results: list[Any] = []
        problem = find_problem(
            lambda: results.append(engine.infer_batch({"texts": names}, preprocess_fn=encode)), harness.engine_class
        )
        expect(problem is None, f"infer_batch failed for a batch of texts with a preprocess_fn: {problem}")
        expect_close(results[0]["log_probs"], expected, harness.tolerance, "log_probs of a batch of texts")
        for raw in ({"texts": names}, torch.zeros(2, 3, dtype=torch.int64)):
            problem = f"infer_batch accepted a {type(raw).__name__} as a batch"
            expect_error(lambda raw=raw: engine.infer_batch(raw), "input_ids", problem)  # pyright: ignore
        expect_error(
            lambda: engine.infer_batch({"texts": names}, preprocess_fn=lambda raw, ctx: (torch.zeros(2, 3), ctx)),
            "input_ids", "infer_batch accepted a tensor from preprocess_fn",
        )  # fmt: skip


def step_equals_oracle(harness: EngineHarness) -> None:
    """The loss, the gradient norm before clipping and every gradient match those of transformers on one row at a time,
    for each head, and for a loss of log-probs and entropy at another temperature."""
    # A temperature above 1 makes the gradients and their rounding errors smaller.
    scaled: StepContext = {"temperature": 1.5}
    with_entropy: StepContext = {"temperature": 1.5, "outputs": ("log_probs", "entropy")}
    cases = [(head, StepContext()) for head in harness.heads(*OUTPUTS)]
    cases += [(head, request) for head in harness.heads("causal_lm") for request in (scaled, with_entropy)]
    for head, request in cases:
        engine = harness.build(head=head)
        loss, norm, gradients = harness.oracle_gradients(engine, head, request=request)
        result = harness.step(engine, harness.batch, request)
        variant = f" with {request}" if request else ""
        expect_close(result.loss, loss, harness.tolerance, f"loss of a {head} engine{variant}")
        expect_close(result.grad_norm, norm, harness.gradient_tolerance, f"gradient norm of a {head} engine{variant}")
        for name, gradient in result.gradients.items():
            subject = f"gradient of {name} of a {head} engine{variant}"
            expect_close(gradient, gradients[name], harness.gradient_tolerance, subject)


def updates_equal_adamw(harness: EngineHarness) -> None:
    """Three updates during and after the warm-up, with weight decay, equal those of torch.optim.AdamW with the
    gradients of transformers."""
    optim = OptimConfig(lr=0.1, betas=(0.7, 0.8), eps=0.1, weight_decay=0.1, lr_warmup_steps=2)
    engine = harness.build(optim=optim, lora=None)
    model: Any = harness.oracle_model(engine, "causal_lm")
    adamw = torch.optim.AdamW(model.parameters(), betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    for rate in (0.05, 0.1, 0.1):
        gradients = oracle_step(model, harness.batch, "causal_lm")[2]
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        harness.train(engine, harness.batch)
        engine.lr_scheduler_step()
    expected = dict(model.named_parameters())
    for name, weight in harness.weights(engine).items():
        expect_close(weight, expected[name].detach(), harness.gradient_tolerance, f"{name} after three updates")


def norm_is_before_clipping(harness: EngineHarness) -> None:
    """optimizer_step clips the gradient norm and returns the norm before clipping."""
    unclipped = harness.step(harness.build(), harness.batch)
    clipped = harness.step(harness.build(grad_clip=1e-3), harness.batch)
    tolerance = harness.gradient_tolerance
    expect_close(clipped.grad_norm, unclipped.grad_norm, tolerance, "the gradient norm with grad_clip=0.001")
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in clipped.gradients.values()))
    expect(abs(norm - 1e-3) < 1e-4, f"with grad_clip=0.001, the gradient norm of the update was {norm:.6f}")


def step_outside_train_mode(harness: EngineHarness) -> None:
    """optimizer_step gives the same result inside train_mode and after leaving it."""
    inside, outside = harness.build(), harness.build()
    expected = harness.train(inside, harness.batch)
    outside.optimizer_zero_grad()
    with outside.train_mode():
        _, loss, _ = outside.forward_backward_step(harness.share(outside, harness.batch))
    norm = outside.optimizer_step()
    expect(
        (float(loss), norm) == (expected.loss, expected.grad_norm),
        "the loss or gradient norm differs from that of a step inside train_mode",
    )
    expect_equal(harness.weights(outside), harness.weights(inside), "weights after a step outside train_mode")


def split_invariance(harness: EngineHarness) -> None:
    """Loss, metrics, gradient norm and gradients depend neither on the split into micro-batches nor on activation
    checkpointing."""
    expected = harness.step(harness.build(), harness.batch)
    variants: list[dict[str, Any]] = [*harness.micro_batch_limits(), {"enable_gradient_checkpointing": True}]
    for changes in variants:
        result = harness.step(harness.build(**changes), harness.batch)
        variant = f"with {changes}"
        expect_close(result.loss, expected.loss, harness.tolerance, f"loss {variant}")
        expect_close(result.grad_norm, expected.grad_norm, harness.gradient_tolerance, f"gradient norm {variant}")
        expect(result.metrics.keys() == expected.metrics.keys(), f"metrics {variant}: {sorted(result.metrics)}")
        for name, value in expected.metrics.items():
            expect_close(result.metrics[name], value, harness.tolerance, f"metric {name} {variant}")
        for name, gradient in expected.gradients.items():
            expect_close(result.gradients[name], gradient, harness.gradient_tolerance, f"gradient of {name} {variant}")


def unread_counts_are_reported(harness: EngineHarness) -> None:
    """If a mini-batch is split, a loss that reads neither num_tokens nor num_sequences causes one warning, because its
    result depends on the split. A loss that reads one of them causes no warning."""
    engine = harness.build(micro_batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        harness.train(engine, harness.batch)
        expect(not _count_warnings(caught), "the engine warned about a loss that divides by num_tokens")
        engine.set_loss_fn(lambda data, predictions, ctx: (predictions["log_probs"].values.mean(), ctx))
        for _ in range(2):
            harness.train(engine, harness.batch)
    number = len(_count_warnings(caught))
    expect(number == 1, f"two steps with a loss that averages each micro-batch gave {number} warnings about num_tokens")


def _count_warnings(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Return the warnings that mention the counts."""
    return [str(warning.message) for warning in caught if "num_tokens" in str(warning.message)]


def prefix_sharing(harness: EngineHarness) -> None:
    """Rows with a common prompt have the same predictions and gradients as separate rows, whether they are in one
    micro-batch or in several."""
    batch = harness.shared_prompt_batch
    for head in harness.heads("causal_lm", "value"):
        variants: list[dict[str, Any]] = [{}, {"max_tokens": 24}, {"micro_batch_size": 3}]
        engines = [harness.build(head=head, **limits) for limits in variants]
        expected = oracle_outputs(harness.oracle_model(engines[0], head), batch, head)
        loss, _, gradients = harness.oracle_gradients(engines[0], head, batch)
        for engine, limits in zip(engines, variants, strict=True):
            variant = f"of a {head} engine with {limits}"
            outputs = harness.infer(engine, StepContext(outputs=harness.outputs(head)), batch)
            for name, values in outputs.items():
                expect_close(values, expected[name], harness.tolerance, f"{name} {variant}")
            result = harness.step(engine, batch)
            expect_close(result.loss, loss, harness.tolerance, f"loss {variant}")
            for weight, gradient in result.gradients.items():
                expect_close(gradient, gradients[weight], harness.gradient_tolerance, f"gradient of {weight} {variant}")


def offload_changes_nothing(harness: EngineHarness) -> None:
    """Moving the model and the optimizer to the CPU between phases changes neither the loss nor the gradient norm nor
    the weights. Neither does a move that the engine refuses."""
    reference_engine, offloaded_engine = harness.build(), harness.build()
    for parts in ({"model": True, "optimizer": True}, {"optimizer": False}, {"model": False}):
        with contextlib.suppress(EngineError):
            offloaded_engine.to("cpu", **parts)
        expected, result = harness.step(reference_engine, harness.batch), harness.step(offloaded_engine, harness.batch)
        expect(
            (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm),
            f"to('cpu', {parts}) before a step changed its loss or gradient norm",
        )
    expect_equal(
        harness.weights(offloaded_engine), harness.weights(reference_engine), "weights after steps with offloading"
    )


def context(harness: EngineHarness) -> None:
    """The returned ctx contains the global counts and the keys of hooks and callers. A column sequence_weight has the
    weights with which num_sequences counts the rows. The ctx can be passed to the next call, which returns these keys
    too. A misspelled control key or an unsupported output raises an error."""
    engine = harness.build(infer_micro_batch_size=2)
    mask: Ragged = harness.batch["loss_mask"]
    share = harness.share(engine, harness.batch)

    def count_rows(data: DataProto, ctx: Any) -> tuple[DataProto, Any]:
        ctx["hook_rows"] = ctx.get("hook_rows", 0) + len(data)
        return data, ctx

    def infer(ctx: Any) -> Any:
        return engine.forward_backward_step(share, ctx, forward_only=True, preprocess_fn=count_rows)[1]

    with engine.eval_mode():
        first_ctx = infer({"caller_key": 1})
        second_ctx = infer(first_ctx)
        expect_error(
            lambda: infer({"temprature": 1.0}), "'temperature'", "the engine accepted a misspelled control key"
        )
        expect_error(
            lambda: infer({"outputs": ("values",)}), "values", "a causal_lm engine accepted outputs=('values',)"
        )
    counts = (float(mask.values.sum()), float((mask.map(Tensor.float).sum() > 0).sum()))
    actual = (first_ctx.get("num_tokens"), first_ctx.get("num_sequences"))
    expect(actual == counts, f"(num_tokens, num_sequences) in ctx are {actual}, but the mini-batch has {counts}")
    weights = torch.arange(1.0, len(mask) + 1) / 8
    weighted = harness.share(engine, harness.batch.with_columns(sequence_weight=weights))
    with engine.eval_mode():
        count = engine.forward_backward_step(weighted, forward_only=True)[1].get("num_sequences")
    expected = float(weights[mask.sum() > 0].sum())
    expect(count == expected, f"with sequence_weight, num_sequences is {count}, but the weights sum to {expected}")
    keys = [(ctx.get("caller_key"), ctx.get("hook_rows", 0)) for ctx in (first_ctx, second_ctx)]
    rows = keys[0][1]
    expect(
        rows >= len(share) and keys == [(1, rows), (1, 2 * rows)],
        f"the keys of caller and hook in the ctx of two calls are {keys}, expected {[(1, rows), (1, 2 * rows)]}",
    )


def padded_batch(harness: EngineHarness) -> None:
    """A mapping of padded tensors gives the same predictions as the equivalent ragged batch."""
    engine = harness.build()
    ids: Ragged = harness.batch["input_ids"]
    padded_columns = {"input_ids": ids.padded("left"), "attention_mask": ids.mask("left")}
    padded_columns["loss_mask"] = harness.batch["loss_mask"].padded("left")
    with engine.eval_mode():
        result, expected = engine.infer_batch(padded_columns), engine.infer_batch(harness.batch)
    expect_close(result["log_probs"], expected["log_probs"], 0.0, "log_probs of a left-padded batch")


def non_finite_gradient_is_skipped(harness: EngineHarness) -> None:
    """If a gradient is not finite on any data-parallel rank, the step changes no weight, is counted, and does not
    affect the next step."""
    engine = harness.build()
    old_weights = harness.weights(engine)
    factor = float("nan") if engine.seat.dp_rank == 0 else 1.0
    engine.set_loss_fn(lambda data, outputs, ctx: (outputs["log_probs"].values.sum() * factor, ctx))
    with engine.train_mode():
        result = engine.train_batch(harness.batch)
    expect(result.skipped and engine.skipped_steps == 1, "a step with a NaN gradient was not reported as skipped")
    expect(not math.isfinite(result.grad_norm), f"the gradient norm of a NaN gradient is {result.grad_norm}")
    expect_equal(harness.weights(engine), old_weights, "weights after a skipped step")
    engine.set_loss_fn(harness.loss_fn("causal_lm"))
    fresh_engine = harness.build()
    next_step, expected = harness.train(engine, harness.batch), harness.train(fresh_engine, harness.batch)
    expect(
        (next_step.loss, next_step.grad_norm) == (expected.loss, expected.grad_norm),
        "a skipped step changed the loss or gradient norm of the next step",
    )
    expect_equal(harness.weights(engine), harness.weights(fresh_engine), "weights of the step after a skipped step")


class _ScalarReads(TorchDispatchMode):
    """Counts reads of scalars from computed tensors. On an accelerator, each of them waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            value = args[0]
            self.count += value.is_floating_point() or value.device.type != "cpu"
        return func(*args, **(kwargs or {}))


def no_wait_per_micro_batch(harness: EngineHarness) -> None:
    """The number of device-to-host synchronizations does not grow with the number of micro-batches."""
    counts = []
    for size in (4, 1):
        engine = harness.build(micro_batch_size=size)
        engine.set_loss_fn(harness.loss_fn("causal_lm"))
        with engine.train_mode(), _ScalarReads() as reads:
            engine.forward_backward_step(harness.batch)
        counts.append(reads.count)
    expect(
        counts[0] == counts[1],
        f"a step with 2 micro-batches reads {counts[0]} scalars from the device, with 8 micro-batches {counts[1]}",
    )


def modes(harness: EngineHarness) -> None:
    """train_mode enables dropout, eval_mode disables it, and both restore the previous mode. Inside share_weights,
    train_mode raises an error."""
    engine = harness.build(override_config={"attention_dropout": 0.5})
    with engine.eval_mode():
        log_probs, repeated = (engine.infer_batch(harness.batch)["log_probs"] for _ in range(2))
        with engine.train_mode():
            with_dropout = engine.infer_batch(harness.batch)["log_probs"]
        restored = engine.infer_batch(harness.batch)["log_probs"]
    expect(not torch.equal(with_dropout.values, log_probs.values), "train_mode did not enable dropout")
    expect(torch.equal(log_probs.values, repeated.values), "eval_mode did not disable dropout")
    expect(torch.equal(log_probs.values, restored.values), "leaving train_mode did not restore eval_mode")
    with engine.share_weights(), contextlib.ExitStack() as stack:
        problem = "train_mode raised no error inside share_weights; call check_not_shared in train_mode"
        expect_error(lambda: stack.enter_context(engine.train_mode()), "shares the weights", problem, EngineError)
    with engine.train_mode():
        pass


def schedule(harness: EngineHarness) -> None:
    """The learning rate rises linearly from above 0 during warm-up, then decays along a cosine to min_lr_ratio
    times its maximum.
    lr_scheduler_step returns the next learning rate."""
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="cosine", total_training_steps=6, min_lr_ratio=0.1)
    engine = harness.build(optim=optim)
    expect(
        engine.learning_rate == 0.5,
        f"the learning rate of the first of two warm-up updates is {engine.learning_rate}, expected 0.5",
    )
    rates = [engine.lr_scheduler_step() for _ in range(6)]
    expect(engine.learning_rate == rates[-1], "learning_rate differs from the return value of lr_scheduler_step")
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    expect_close(torch.tensor(rates), torch.tensor([1.0, *cosine]), 1e-6, "learning rates of updates 1 to 6")


def runs_are_reproducible(harness: EngineHarness) -> None:
    """With the same seed, batch and layout, losses, norms and weights are bitwise equal."""
    runs = []
    for _ in range(2):
        engine = harness.build(random_init=True, micro_batch_size=3)
        steps = [harness.train(engine, harness.batch) for _ in range(3)]
        runs.append(([(s.loss, s.grad_norm) for s in steps], harness.weights(engine)))
    expect(runs[0][0] == runs[1][0], f"two runs have (loss, gradient norm) {runs[0][0]} and {runs[1][0]}")
    expect_equal(runs[0][1], runs[1][1], "weights of two runs")


def seat_and_shards(harness: EngineHarness) -> None:
    """Each rank in `seat` is less than the size of its group. `seat` agrees with the number of ranks and with
    `ranks_per_row` of the options. Exactly one process of each data-parallel rank collects outputs. unshard_data
    inverts shard_data."""
    engine = harness.build()
    seat, seats = engine.seat, harness.all_gather(engine.seat)
    expect(0 <= seat.dp_rank < seat.dp_size <= seat.world, f"seat violates dp_rank < dp_size <= world: {seat}")
    expect(seat.world == len(seats), f"seat has world={seat.world}, but the engine has {len(seats)} ranks")
    per_row = engine.capabilities.options.from_dict(engine.config.options).ranks_per_row()
    expect(
        seat.dp_size * per_row == seat.world,
        f"seat has dp_size={seat.dp_size} and world={seat.world}, but ranks_per_row of the options returns {per_row}",
    )
    collecting = sorted(other.dp_rank for other in seats if other.collects)
    expect(collecting == list(range(seat.dp_size)), f"the ranks with seat.collects have the dp_ranks {collecting}")
    restored = engine.unshard_data(engine.shard_data(harness.batch))
    expect(
        torch.equal(restored["input_ids"].values, harness.batch["input_ids"].values),
        "unshard_data(shard_data(batch)) differs from the batch",
    )


def libraries_stay_unpatched(harness: EngineHarness) -> None:
    """Building an engine, training and saving replace no function of torch or transformers."""
    functions_before = _functions()
    engine = harness.build()
    harness.step(engine, harness.batch)
    functions_after = _functions()
    changed = [
        name for name, function in functions_after.items() if functions_before.get(name, function) is not function
    ]
    # The compiler of torch replaces some functions of torch.
    changed = [name for name in changed if not str(functions_after[name].__module__).startswith("torch._dynamo.")]
    expect(not changed, f"the engine has replaced {', '.join(changed)}")


def _functions() -> dict[str, Any]:
    """Return the functions and classes of torch and transformers that an engine might replace, by name."""
    import transformers.models.qwen2.modeling_qwen2 as modeling

    functions: dict[str, Any] = {}
    for module in (modeling, torch.nn.functional, torch.distributed, torch.optim, torch):
        functions |= {f"{module.__name__}.{n}": f for n, f in vars(module).items() if callable(f)}
    for cls in (modeling.Qwen2Attention, modeling.Qwen2Model, torch.nn.Module, torch.optim.AdamW, torch.nn.Linear):
        functions |= {f"{cls.__name__}.{n}": f for n, f in vars(cls).items() if callable(f)}
    return functions


RULES: tuple[Rule[EngineHarness], ...] = make_rules(
    interface, predictions, order_of_rows, token_budget_is_hard, hooks, raw_batches, step_equals_oracle,
    updates_equal_adamw, hyperparameters_of_a_step, norm_is_before_clipping, step_outside_train_mode, split_invariance,
    unread_counts_are_reported, prefix_sharing, offload_changes_nothing, context, padded_batch,
    non_finite_gradient_is_skipped, no_wait_per_micro_batch, modes, schedule, runs_are_reproducible, seat_and_shards,
    errors_name_the_missing_call, libraries_stay_unpatched, checkpoints.weights_have_hugging_face_names,
    checkpoints.resume_is_bitwise, checkpoints.damaged_checkpoints_are_rejected, checkpoints.retention,
    checkpoints.remote_copy, adapter, adapter_groups, exact_kl, inference_within_a_step, free_targets,
)  # fmt: skip


def check_engine(
    engine_class: type[BaseEngine],
    folder: str,
    rules: Sequence[Rule[EngineHarness]] = RULES,
    device: str = "cpu",
    common_fields: Mapping[str, Any] | None = None,
) -> Iterator[Verdict]:
    """Check `rules` and yield the verdict of each; `folder` is a scratch folder.

    `common_fields` are config fields of every engine. If the class cannot be constructed, yield a single verdict.
    """
    problem = construction_problem(engine_class, folder, device, common_fields)
    if problem is not None:
        yield Verdict(RULES[0], problem)
        return
    yield from run_rules(
        rules, lambda number: EngineHarness(engine_class, f"{folder}/{number:02d}", device, common_fields), engine_class
    )


def construction_problem(
    engine_class: type[BaseEngine], folder: str, device: str, common_fields: Mapping[str, Any] | None
) -> str | None:
    """Construct the engine without its model; return a description of the error, or None."""
    harness = EngineHarness(engine_class, f"{folder}/construction", device, common_fields)
    problem = find_problem(lambda: engine_class(harness.config()))
    return None if problem is None else f"{engine_class.__name__} cannot be constructed: {problem}"
