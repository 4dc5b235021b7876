"""Rules of the engine contract about checkpoints and exported weights."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.contracts.engine.oracle import oracle_outputs
from camshaft.contracts.rules import expect, expect_error, find_problem
from camshaft.engine.base import BaseEngine
from camshaft.engine.context import StepContext
from camshaft.engine.single import SingleDeviceEngine


def weights_have_hugging_face_names(harness: EngineHarness) -> None:
    """named_weights yields full tensors with the names, shapes and dtypes that transformers stores. transformers
    computes the same log-probs with these tensors. A tensor does not change while others are yielded. With dtype_of,
    the same tensors are cast. If yields_live_weights is True, named_weights does not copy."""
    engine = harness.build()
    harness.train(engine, harness.batch)
    model: Any = harness.oracle_model(engine, "causal_lm")
    log_probs = harness.infer(engine, StepContext(outputs=("log_probs",)))["log_probs"]
    expect_close(
        log_probs,
        oracle_outputs(model, harness.batch, "causal_lm")["log_probs"],
        harness.tolerance,
        "log_probs, compared with a transformers model that has the weights of named_weights",
    )
    if engine.yields_live_weights:
        with engine.eval_mode():
            pairs = zip(engine.named_weights(), engine.named_weights(), strict=True)
            copies = [name for (name, first), (_, second) in pairs if first.data_ptr() != second.data_ptr()]
        expect(not copies, f"yields_live_weights is True, but named_weights yields copies of {', '.join(copies)}")
    weights = harness.weights(engine)
    expect_equal(dict(engine.named_weights()), weights, "weights that are kept while others are yielded")
    cast_weights = dict(engine.named_weights(dtype_of=lambda name, tensor: torch.bfloat16))
    expected = {name: weight.bfloat16() for name, weight in weights.items()}
    expect(
        {weight.dtype for weight in cast_weights.values()} == {torch.bfloat16},
        "named_weights does not yield bfloat16 tensors if dtype_of returns bfloat16",
    )
    expect_equal(cast_weights, expected, "weights cast to bfloat16")
    if "bfloat16" in harness.engine_class.capabilities.dtypes:
        harness.oracle_model(harness.build(dtype="bfloat16", forward_only=True), "causal_lm")  # compares the dtypes


def resume_is_bitwise(harness: EngineHarness) -> None:
    """After a checkpoint is loaded, the weights, the learning rate, the number of skipped steps and all later steps are
    bitwise identical to those of the engine that saved it. The reference engine, with which `camshaft
    export` reads checkpoints, loads the same weights."""
    optim = OptimConfig(lr=0.5, eps=1.0, lr_warmup_steps=8)
    changes: dict[str, Any] = {
        "override_config": {"attention_dropout": 0.1},
        "micro_batch_size": 3,
        "optim": optim,
    }
    engine = harness.build(**changes)
    engine.set_loss_fn(lambda _, out, ctx: (out["log_probs"].values.sum() * float("nan") / ctx["num_tokens"], ctx))
    harness.train(engine, harness.batch)
    engine.set_loss_fn(harness.loss_fn("causal_lm"))
    for _ in range(2):
        harness.train(engine, harness.batch)
        engine.lr_scheduler_step()
    harness.infer(engine)  # inference may gather sharded weights
    path = harness.folder / "ckpt" / "global_step_2" / "actor"
    harness.save(engine, path, global_step=2)
    state, saved_weights = (engine.learning_rate, engine.skipped_steps), harness.weights(engine)
    continued = [harness.train(engine, harness.batch) for _ in range(2)]
    loaded_engine = harness.build(**changes)
    harness.infer(loaded_engine)
    with _UnsafeLoads() as unsafe:
        loaded_engine.load_checkpoint(str(path))
    expect(not unsafe, "load_checkpoint called torch.load with weights_only=False")
    actual = loaded_engine.learning_rate, loaded_engine.skipped_steps
    expect(actual == state, f"(learning_rate, skipped_steps) are {actual} after loading, but {state} were saved")
    expect_equal(harness.weights(loaded_engine), saved_weights, "weights after loading")
    resumed = [harness.train(loaded_engine, harness.batch) for _ in range(2)]
    actual, expected = ([(step.loss, step.grad_norm) for step in steps] for steps in (resumed, continued))
    expect(
        actual == expected,
        f"(loss, gradient norm) of two steps after loading are {actual}, but {expected} in the engine that saved",
    )
    expect_equal(harness.weights(loaded_engine), harness.weights(engine), "weights two steps after loading")
    _check_reference_loads(harness, engine, path, saved_weights)


def _check_reference_loads(
    harness: EngineHarness, engine: BaseEngine, path: Path, saved_weights: dict[str, Tensor]
) -> None:
    """Load the weights of a checkpoint of `engine` into the reference engine, and compare them with `saved_weights`."""
    reference = SingleDeviceEngine(engine.config.model_copy(update={"options": {}, "optim": None}))
    reference.init_model()
    problem = find_problem(lambda: reference.load_checkpoint(str(path)))
    expect(problem is None, f"the reference engine, which exports checkpoints, cannot load this one: {problem}")
    expect_equal(harness.weights(reference), saved_weights, "weights that the reference engine loads")


def damaged_checkpoints_are_rejected(harness: EngineHarness) -> None:
    """Loading a checkpoint with a missing or changed file raises an error that names the file."""
    engine = harness.build()
    intact = harness.folder / "intact"
    harness.save(engine, intact)
    leftovers = [path.name for path in harness.folder.iterdir() if path.name not in ("model", "intact")]
    leftovers = harness.all_gather(leftovers)[0]
    expect(not leftovers, f"save_checkpoint left the temporary files {leftovers}")
    for number, path in enumerate(sorted(path for path in intact.rglob("*") if path.is_file())):
        folder = harness.folder / f"damaged{number}"
        damaged_file = folder / path.relative_to(intact)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        harness.on_rank_zero(lambda d=folder, f=damaged_file: (shutil.copytree(intact, d), f.unlink()))
        expect_error(
            lambda d=folder: engine.load_checkpoint(str(d)),
            path.name,
            f"load_checkpoint accepted a checkpoint without {path.name}",
        )
        if path.name == "manifest.json":
            continue
        harness.on_rank_zero(lambda f=damaged_file, c=content: f.write_bytes(c))
        expect_error(
            lambda d=folder: engine.load_checkpoint(str(d)),
            path.name,
            f"load_checkpoint accepted a changed {path.name}",
        )
    expect_error(
        lambda: engine.load_checkpoint(str(harness.folder / "nowhere")),
        "nowhere",
        "load_checkpoint accepted a folder that does not exist",
    )


def retention(harness: EngineHarness) -> None:
    """max_ckpt_to_keep removes the oldest checkpoints of the same engine, under any name, and no other file."""
    engine = harness.build()
    root = harness.folder / "run"
    for step in (5, 10, 20):
        harness.save(engine, root / f"global_step_{step}" / "actor", global_step=step, max_ckpt_to_keep=2)
        harness.on_rank_zero((root / f"global_step_{step}" / "note.txt").touch)
    actors = sorted(path.parent.name for path in root.glob("global_step_*/actor"))
    expect(actors == ["global_step_10", "global_step_20"], f"three saves with max_ckpt_to_keep=2 left {actors}")
    expect((root / "global_step_5" / "note.txt").exists(), "retention removed a file that is not part of a checkpoint")
    flat, other = harness.folder / "flat", harness.build()
    harness.save(other, flat / "other", max_ckpt_to_keep=1)
    for step, name in enumerate(("zeroth", "first", "second")):
        harness.save(engine, flat / name, global_step=step, max_ckpt_to_keep=2)
    names = sorted(path.name for path in flat.iterdir())
    expect(names == ["first", "other", "second"], f"three saves beside another engine's, keeping two, left {names}")
    other.load_checkpoint(str(flat / "second"))
    harness.save(other, flat / "third", global_step=3, max_ckpt_to_keep=1)
    names = sorted(path.name for path in flat.iterdir())
    expect(names == ["other", "third"], f"after loading the last one and keeping one, {names} are left")


def remote_copy(harness: EngineHarness) -> None:
    """With hdfs_path, save_checkpoint also writes a copy there. load_checkpoint downloads that copy and afterwards
    deletes only what it downloaded."""
    engine = harness.build()
    local, remote, copy = (str(harness.folder / name) for name in ("local", "remote", "copy"))
    harness.save(engine, Path(local), hdfs_path=remote)
    harness.train(engine, harness.batch)
    new_engine = harness.build()
    new_engine.load_checkpoint(copy, hdfs_path=remote, del_local_after_load=True)
    expect(
        not Path(copy).exists() and Path(remote).exists(),
        "load_checkpoint kept the local copy, or removed the remote checkpoint",
    )
    new_engine.load_checkpoint(local)
    expect(Path(local).exists(), "load_checkpoint removed a checkpoint that was local before the call")


class _UnsafeLoads:
    """Records calls of torch.load that could run code from a file."""

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.load = torch.load

        def recording_load(*args: Any, **kwargs: Any) -> Any:
            # Collectives that exchange pickled tensors also call torch.load, but not with a file.
            is_collective = sys._getframe(1).f_code.co_name == "_load_from_bytes"
            if kwargs.get("weights_only") is False and not is_collective:
                self.calls.append(str(args[:1]))
            return self.load(*args, **kwargs)

        torch.load = recording_load
        return self.calls

    def __exit__(self, *exc: object) -> None:
        torch.load = self.load
