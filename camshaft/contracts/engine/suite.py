"""The contract of `BaseEngine` as a suite that runs on anybody's engine.

    camshaft check-engine my_pkg.my_engine:MyEngine          # a table of what holds
    for finding in check_engine(MyEngine, folder): ...       # in a program

The oracle is not an engine: it is `transformers` itself on each row alone (`plain.py` beside this file).
Gradients are read off the weights: with eps=1, no decay and no clipping the first AdamW update is
lr * g / (|g| + 1), which can be solved for g, so no engine has to expose its gradients.

A rule is a function of a `EngineHarness`; what it proves is its docstring, and its name is what a report shows.
Rules of the modes and the step are here, those of files in `checkpoints.py`, of adapters in `adapters.py`,
of what a KL in the loss rests on in `exact_kl.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine import checkpoints as files
from camshaft.contracts.engine.adapters import adapter
from camshaft.contracts.engine.exact_kl import asked_within_a_step, divergence
from camshaft.contracts.engine.harness import EngineHarness, close, same_bits
from camshaft.contracts.engine.oracle import plain_outputs
from camshaft.contracts.rules import Finding, Rule, expect, expect_error, rules_of, run_rules
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.base import OUTPUTS_OF_HEAD, BaseEngine, StepContext


def interface(harness: EngineHarness) -> None:
    """The engine is a BaseEngine with the specified signatures; a missing method fails at construction."""
    for name, member in vars(BaseEngine).items():
        if not inspect.isfunction(member) or name.startswith("_"):
            continue
        wanted, found = inspect.signature(member), inspect.signature(getattr(harness.engine_class, name))
        ours = {n: p.default for n, p in wanted.parameters.items()}
        theirs = {n: p.default for n, p in found.parameters.items()}
        expect(ours.items() <= theirs.items(), f"{name}{found} does not take what BaseEngine.{name}{wanted} takes")
    crippled = type("Crippled", (harness.engine_class,), {})
    crippled.__abstractmethods__ = frozenset({"optimizer_step"})  # pyright: ignore[reportAttributeAccessIssue]
    expect_error(
        lambda: crippled(harness.config()),
        "optimizer_step",
        "a class that lacks optimizer_step was constructed",
        TypeError,
    )


def predictions(harness: EngineHarness) -> None:
    """every output of every head equals a plain forward of each row alone; zero outside loss_mask."""
    for head, outputs in OUTPUTS_OF_HEAD.items():
        engine = harness.build(head=head, random_init=head == "reward")
        found = harness.infer(engine, StepContext(outputs=outputs, temperature=0.7))
        oracle = plain_outputs(harness.plain_model(engine, head), harness.batch, head, temperature=0.7)
        expect(set(found) == set(outputs), f"asked a {head} engine for {outputs}, got {sorted(found)}")
        for name in outputs:
            close(found[name], oracle[name], harness.tolerance, f"{name} of a {head} engine")


def any_split_same_order(harness: EngineHarness) -> None:
    """Predictions come back in the order of the rows, for any micro-batch size and any token budget."""
    engine = harness.build()
    with engine.eval_mode():
        whole = engine.infer_batch(harness.batch)["log_probs"]
    for limits in harness.splits():
        other = harness.build(**{f"infer_{name}": value for name, value in limits.items()})
        with other.eval_mode():
            close(other.infer_batch(harness.batch)["log_probs"], whole, harness.tolerance, f"log_probs with {limits}")
            one = other.infer_batch(harness.batch.reorder([3]))["log_probs"]
        close(one, whole.select([3]), harness.tolerance, f"one row alone with {limits}")


def token_budget_is_hard(harness: EngineHarness) -> None:
    """No micro-batch holds more than `max_tokens` tokens; a longer row is refused, not squeezed in."""
    budget = int(harness.batch["input_ids"].lengths.max()) + 2
    seen: list[int] = []

    def watch(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        seen.append(len(data["input_ids"].values))
        return data, ctx

    engine = harness.build(max_tokens=budget, infer_max_tokens=budget)
    with engine.train_mode():
        engine.forward_backward_step(harness.batch, preprocess_fn=watch)
    expect(len(seen) > 1 and max(seen) <= budget, f"with max_tokens={budget} the micro-batches hold {seen} tokens")
    tight = harness.build(max_tokens=budget - 3)
    with tight.train_mode():
        expect_error(
            lambda: tight.forward_backward_step(harness.batch), str(budget - 3), "a row over the budget was accepted"
        )


def hooks(harness: EngineHarness) -> None:
    """preprocess_fn and postprocess_fn run once per micro-batch, in that order, and steer what they should."""
    calls: list[str] = []

    def before(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        calls.append("before")
        ctx["extras"]["rows"] = len(data)
        return data, ctx

    def after(outputs: Any, ctx: StepContext) -> tuple[Any, StepContext]:
        calls.append(f"after {ctx['extras']['rows']}")
        return {"doubled": outputs["log_probs"].map(lambda v: 2 * v)}, ctx

    engine = harness.build(infer_micro_batch_size=2)
    with engine.eval_mode():
        plain = engine.infer_batch(harness.batch)["log_probs"]
        found, ctx = engine.forward_backward_step(
            harness.batch, {"extras": {"mine": 1}}, forward_only=True, preprocess_fn=before, postprocess_fn=after
        )
    expect(
        calls == ["before", "after 2"] * (len(calls) // 2) and len(calls) == len(harness.batch), f"hooks ran as {calls}"
    )
    close(found["doubled"], plain.map(lambda v: 2 * v), 0.0, "predictions of postprocess_fn")
    expect(ctx["extras"]["mine"] == 1, "ctx['extras'] did not come back")


def step_equals_plain(harness: EngineHarness) -> None:
    """Loss, gradient norm (before clipping) and every gradient equal a plain loop over single rows."""
    for head in ("causal_lm", "value"):
        engine = harness.build(head=head)
        loss, norm, gradients = harness.plain_gradients(engine, head)
        found = harness.step(engine, harness.batch)
        close(torch.tensor(found.loss), torch.tensor(loss), harness.tolerance, f"loss of a {head} engine")
        close(
            torch.tensor(found.grad_norm),
            torch.tensor(norm),
            harness.tolerance * 10,
            f"gradient norm of a {head} engine",
        )
        for name, gradient in found.gradients.items():
            close(gradient, gradients[name], harness.tolerance * 10, f"gradient of {name}")


def norm_is_before_clipping(harness: EngineHarness) -> None:
    """optimizer_step clips what it applies and returns the norm before that."""
    free, tight = (
        harness.step(harness.build(), harness.batch),
        harness.step(harness.build(grad_clip=1e-3), harness.batch),
    )
    close(torch.tensor(tight.grad_norm), torch.tensor(free.grad_norm), harness.tolerance, "the norm with a tight clip")
    clipped = math.sqrt(sum(float((g.double() ** 2).sum()) for g in tight.gradients.values()))
    expect(abs(clipped - 1e-3) < 1e-4, f"grad_clip=0.001, but the gradient applied had norm {clipped:.6f}")


def step_outside_train_mode(harness: EngineHarness) -> None:
    """optimizer_step after train_mode has ended is the step it would have been inside."""
    inside, outside = harness.build(), harness.build()
    wanted = harness.train(inside, harness.batch)
    outside.optimizer_zero_grad()
    with outside.train_mode():
        _, loss, _ = outside.forward_backward_step(harness.share(outside, harness.batch))
    norm = outside.optimizer_step()
    expect((float(loss), norm) == (wanted.loss, wanted.grad_norm), "loss or norm differ from a step inside train_mode")
    same_bits(harness.weights(outside), harness.weights(inside), "weights after a step outside train_mode")


def split_invariance(harness: EngineHarness) -> None:
    """Loss, metrics, gradient norm and gradients are the same for every way to split and to keep the batch."""
    whole = harness.step(harness.build(), harness.batch)
    variants: list[dict[str, Any]] = [*harness.splits(), {"enable_gradient_checkpointing": True}]
    for changes in variants:
        found = harness.step(harness.build(**changes), harness.batch)
        told = f"with {changes}"
        close(torch.tensor(found.loss), torch.tensor(whole.loss), harness.tolerance, f"loss {told}")
        close(
            torch.tensor(found.grad_norm),
            torch.tensor(whole.grad_norm),
            harness.tolerance * 10,
            f"gradient norm {told}",
        )
        expect(found.metrics.keys() == whole.metrics.keys(), f"metrics {told}: {sorted(found.metrics)}")
        for name, value in whole.metrics.items():
            close(torch.tensor(found.metrics[name]), torch.tensor(value), harness.tolerance, f"metric {name} {told}")
        for name, gradient in whole.gradients.items():
            close(found.gradients[name], gradient, harness.tolerance * 10, f"gradient of {name} {told}")


def rows_that_begin_alike(harness: EngineHarness) -> None:
    """Rows with one prompt, in one micro-batch or in several, give the predictions and gradients of each row alone."""
    batch = harness.siblings
    for head in ("causal_lm", "value"):
        tried: list[dict[str, Any]] = [{}, {"max_tokens": 24}, {"micro_batch_size": 3}]
        engines = [harness.build(head=head, **limits) for limits in tried]
        oracle = plain_outputs(harness.plain_model(engines[0], head), batch, head)
        loss, _, gradients = harness.plain_gradients(engines[0], head, batch)
        for engine, limits in zip(engines, tried, strict=True):
            told = f"of a {head} engine with {limits}"
            inferred = harness.infer(engine, StepContext(outputs=OUTPUTS_OF_HEAD[head]), batch)
            for name, values in inferred.items():
                close(values, oracle[name], harness.tolerance, f"{name} {told}")
            found = harness.step(engine, batch)
            close(torch.tensor(found.loss), torch.tensor(loss), harness.tolerance, f"loss {told}")
            for weight, gradient in found.gradients.items():
                close(gradient, gradients[weight], harness.tolerance * 10, f"gradient of {weight} {told}")


def offload_changes_nothing(harness: EngineHarness) -> None:
    """Moving model and optimizer to the CPU between phases leaves the numbers as they are."""
    still, moved = harness.build(), harness.build()
    for what in ({"model": True, "optimizer": True}, {"optimizer": False}, {"model": False}):
        moved.to("cpu", **what)
        a, b = harness.step(still, harness.batch), harness.step(moved, harness.batch)
        expect(
            a.loss == b.loss and a.grad_norm == b.grad_norm, f"a step after to('cpu', {what}) differs from one without"
        )
    same_bits(harness.weights(moved), harness.weights(still), "weights after steps with moves between them")


def context(harness: EngineHarness) -> None:
    """ctx holds the global counts, honours temperature and outputs, and refuses a key that nobody reads."""
    engine = harness.build(infer_micro_batch_size=2)
    mask: Ragged = harness.batch["loss_mask"]
    with engine.eval_mode():
        _, ctx = engine.forward_backward_step(harness.share(engine, harness.batch), forward_only=True)
        expect_error(
            lambda: engine.forward_backward_step(harness.batch, {"temprature": 1.0}, forward_only=True),  # pyright: ignore
            "temprature", "an unknown ctx key was accepted",
        )  # fmt: skip
        expect_error(
            lambda: engine.forward_backward_step(harness.batch, {"outputs": ("values",)}, forward_only=True),
            "values", "a causal_lm engine accepted outputs=('values',)",
        )  # fmt: skip
    counts = (float(mask.values.sum()), float((mask.map(Tensor.float).sum() > 0).sum()))
    found = (ctx.get("num_tokens"), ctx.get("num_sequences"))
    expect(found == counts, f"ctx counts (num_tokens, num_sequences) are {found}, the mini-batch has {counts}")


def padded_border(harness: EngineHarness) -> None:
    """A padded mapping gives the same predictions as the ragged batch that it stands for."""
    engine = harness.build()
    ids: Ragged = harness.batch["input_ids"]
    grids = {"input_ids": ids.padded("left"), "attention_mask": ids.mask("left")}
    grids["loss_mask"] = harness.batch["loss_mask"].padded("left")
    with engine.eval_mode():
        close(
            engine.infer_batch(grids)["log_probs"],
            engine.infer_batch(harness.batch)["log_probs"],
            0.0,
            "a left-padded batch",
        )


def non_finite_gradient_is_skipped(harness: EngineHarness) -> None:
    """A gradient that is not finite changes no weight, is counted, and leaves the next step as it was."""
    engine = harness.build()
    before = harness.weights(engine)
    engine.set_loss_fn(lambda data, found, ctx: (found["log_probs"].values.sum() * float("nan"), ctx))
    with engine.train_mode():
        result = engine.train_batch(harness.batch)
    expect(result.skipped and engine.skipped_steps == 1, "a NaN gradient was not reported as a skipped step")
    expect(not math.isfinite(result.grad_norm), f"the norm of a NaN gradient was reported as {result.grad_norm}")
    same_bits(harness.weights(engine), before, "weights after a skipped step")
    engine.set_loss_fn(harness.loss_fn("causal_lm"))
    after, fresh = harness.train(engine, harness.batch), harness.train(harness.build(), harness.batch)
    expect(after.loss == fresh.loss and after.grad_norm == fresh.grad_norm, "the step after a skipped one differs")


class _ReadsOfNumbers(TorchDispatchMode):
    """Counts reads of a number that training computed: on an accelerator each of them waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            value = args[0]
            self.count += value.is_floating_point() or value.device.type != "cpu"
        return func(*args, **(kwargs or {}))


def no_wait_per_micro_batch(harness: EngineHarness) -> None:
    """How often numbers are read back from the device does not grow with the number of micro-batches."""
    counts = []
    for size in (4, 1):
        engine = harness.build(micro_batch_size=size)
        engine.set_loss_fn(harness.loss_fn("causal_lm"))
        with engine.train_mode(), _ReadsOfNumbers() as reads:
            engine.forward_backward_step(harness.batch)
        counts.append(reads.count)
    expect(counts[0] == counts[1], f"2 micro-batches read {counts[0]} numbers back, 8 read {counts[1]}")


def modes(harness: EngineHarness) -> None:
    """train_mode has dropout, eval_mode has none, and both put back what they found."""
    engine = harness.build(override_config={"attention_dropout": 0.5})
    with engine.eval_mode():
        first, second = engine.infer_batch(harness.batch)["log_probs"], engine.infer_batch(harness.batch)["log_probs"]
        with engine.train_mode():
            noisy = engine.infer_batch(harness.batch)["log_probs"]
        third = engine.infer_batch(harness.batch)["log_probs"]
    expect(not torch.equal(noisy.values, first.values), "train_mode has no dropout")
    expect(torch.equal(first.values, second.values), "eval_mode has dropout")
    expect(torch.equal(first.values, third.values), "leaving train_mode did not put eval_mode back")


def schedule(harness: EngineHarness) -> None:
    """Linear warm-up from above 0, then cosine to min_lr_ratio; lr_scheduler_step returns the next rate."""
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="cosine", total_training_steps=6, min_lr_ratio=0.1)
    engine = harness.build(optim=optim)
    expect(engine.learning_rate == 0.5, f"the first of two warm-up updates is at rate {engine.learning_rate}, not 0.5")
    found = [engine.lr_scheduler_step() for _ in range(6)]
    expect(engine.learning_rate == found[-1], "learning_rate is not what lr_scheduler_step returned")
    wave = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    close(torch.tensor(found), torch.tensor([1.0, *wave]), 1e-6, "rates of updates 1 to 6")


def same_bits_twice(harness: EngineHarness) -> None:
    """Same seed, same batch, same layout: bitwise the same losses, norms and weights."""
    runs = []
    for _ in range(2):
        engine = harness.build(random_init=True, micro_batch_size=3)
        steps = [harness.train(engine, harness.batch) for _ in range(3)]
        runs.append(([(s.loss, s.grad_norm) for s in steps], harness.weights(engine)))
    expect(runs[0][0] == runs[1][0], f"two runs gave {runs[0][0]} and {runs[1][0]}")
    same_bits(runs[0][1], runs[1][1], "weights of two runs")


def seat_and_shards(harness: EngineHarness) -> None:
    """The seat fits its group; unshard_data gives back what shard_data took apart."""
    engine = harness.build()
    seat = engine.seat
    expect(0 <= seat.dp_rank < seat.dp_size <= seat.world, f"{seat} does not fit")
    back = engine.unshard_data(engine.shard_data(harness.batch))
    expect(
        torch.equal(back["input_ids"].values, harness.batch["input_ids"].values), "unshard_data(shard_data(x)) is not x"
    )


def errors_name_the_step(harness: EngineHarness) -> None:
    """Calls in the wrong order are errors that say what was forgotten."""
    raw = harness.engine_class(harness.config())
    expect_error(lambda: next(iter(raw.named_weights())), "init_model", "named_weights worked without init_model")
    engine = harness.build(set_loss=False)
    with engine.train_mode():
        expect_error(lambda: engine.forward_backward_step(harness.batch), "set_loss_fn", "a step worked without a loss")
    still = harness.build(forward_only=True)
    expect_error(still.optimizer_step, "forward-only", "a forward-only engine took an optimizer step")
    without = harness.build(lora=None)
    expect_error(lambda: without.disable_adapter().__enter__(), "adapter", "disable_adapter worked without an adapter")


def libraries_are_left_alone(harness: EngineHarness) -> None:
    """No function of torch or transformers is another one after building, stepping and saving."""
    before = _functions()
    engine = harness.build()
    harness.step(engine, harness.batch)
    after = _functions()
    changed = [name for name, function in after.items() if before.get(name, function) is not function]
    # What torch's compiler does to torch is not the engine's doing.
    changed = [name for name in changed if not str(after[name].__module__).startswith("torch._dynamo.")]
    expect(not changed, f"patched: {', '.join(changed)}")


def _functions() -> dict[str, Any]:
    import transformers.models.qwen2.modeling_qwen2 as modeling

    found: dict[str, Any] = {}
    for module in (modeling, torch.nn.functional, torch.distributed, torch.optim, torch):
        found |= {f"{module.__name__}.{n}": f for n, f in vars(module).items() if callable(f)}
    for cls in (modeling.Qwen2Attention, modeling.Qwen2Model, torch.nn.Module, torch.optim.AdamW, torch.nn.Linear):
        found |= {f"{cls.__name__}.{n}": f for n, f in vars(cls).items() if callable(f)}
    return found


RULES: tuple[Rule[EngineHarness], ...] = rules_of(
    interface, predictions, any_split_same_order, token_budget_is_hard, hooks, step_equals_plain,
    norm_is_before_clipping, step_outside_train_mode, split_invariance, rows_that_begin_alike,
    offload_changes_nothing, context, padded_border, non_finite_gradient_is_skipped, no_wait_per_micro_batch, modes,
    schedule, same_bits_twice, seat_and_shards, errors_name_the_step, libraries_are_left_alone,
    files.weights_have_hugging_face_names, files.resume_is_bitwise, files.half_a_checkpoint_is_none, files.retention,
    files.remote_copy, adapter, divergence,
    asked_within_a_step,
)  # fmt: skip


def check_engine(
    engine_class: type[BaseEngine],
    folder: str,
    rules: Sequence[Rule[EngineHarness]] = RULES,
    device: str = "cpu",
    always: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """Try the rules in `folder` (a scratch place), each finding as it is made."""
    return run_rules(rules, lambda number: EngineHarness(engine_class, f"{folder}/{number:02d}", device, always))
