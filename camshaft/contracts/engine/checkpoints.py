"""Rules of the engine contract about what reaches the disk and what leaves for a rollout."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from camshaft.contracts.engine.harness import EngineHarness, close, same_bits
from camshaft.contracts.engine.oracle import plain_outputs
from camshaft.contracts.rules import expect, expect_error
from camshaft.engine.base import StepContext


def weights_have_hugging_face_names(harness: EngineHarness) -> None:
    """named_weights are full tensors under Hugging Face names; in plain transformers they give the same numbers."""
    engine = harness.build()
    harness.train(engine, harness.batch)
    model: Any = harness.plain_model(engine, "causal_lm")
    found = harness.infer(engine, StepContext(outputs=("log_probs",)))["log_probs"]
    close(
        found,
        plain_outputs(model, harness.batch, "causal_lm")["log_probs"],
        harness.tolerance,
        "log_probs of the weights",
    )


def resume_is_bitwise(harness: EngineHarness) -> None:
    """Save, throw the engine away, load into a new one: weights and the next steps are the same bits."""
    changes: dict[str, Any] = {"override_config": {"attention_dropout": 0.1}, "micro_batch_size": 3}
    engine = harness.build(**changes)
    for _ in range(2):
        harness.train(engine, harness.batch)
        engine.lr_scheduler_step()
    path = harness.folder / "ckpt" / "global_step_2" / "actor"
    harness.save(engine, path, global_step=2)
    on = [harness.train(engine, harness.batch) for _ in range(2)]
    again = harness.build(**changes)
    with _watched_torch_load() as unsafe:
        again.load_checkpoint(str(path))
    expect(not unsafe, "load_checkpoint called torch.load with weights_only=False")
    after = [harness.train(again, harness.batch) for _ in range(2)]
    told, wanted = ([(step.loss, step.grad_norm) for step in steps] for steps in (after, on))
    expect(told == wanted, f"(loss, norm) of the steps after loading: {told}, without a stop: {wanted}")
    same_bits(harness.weights(again), harness.weights(engine), "weights two steps after loading")


def half_a_checkpoint_is_none(harness: EngineHarness) -> None:
    """A checkpoint with a missing, shortened or changed file is refused by the file's name."""
    engine = harness.build()
    whole = harness.folder / "whole"
    harness.save(engine, whole)
    leftovers = [path.name for path in harness.folder.iterdir() if path.name not in ("model", "whole")]
    leftovers = harness.of_all_ranks(leftovers)[0]
    expect(not leftovers, f"save_checkpoint left {leftovers} behind")
    for number, path in enumerate(sorted(path for path in whole.rglob("*") if path.is_file())):
        broken = harness.folder / f"broken{number}"
        victim = broken / path.relative_to(whole)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        harness.on_rank_zero(lambda b=broken, v=victim: (shutil.copytree(whole, b), v.unlink()))
        expect_error(
            lambda b=broken: engine.load_checkpoint(str(b)), path.name, f"loaded a checkpoint without {path.name}"
        )
        if path.name == "manifest.json":
            continue
        harness.on_rank_zero(lambda v=victim, c=content: v.write_bytes(c))
        expect_error(lambda b=broken: engine.load_checkpoint(str(b)), path.name, f"loaded a damaged {path.name}")
    expect_error(lambda: engine.load_checkpoint(str(harness.folder / "nowhere")), "nowhere", "loaded what is not there")


def retention(harness: EngineHarness) -> None:
    """max_ckpt_to_keep removes the oldest global_step_<n> folders of the same role, and nothing else."""
    engine = harness.build()
    root = harness.folder / "run"
    for step in (5, 10, 20):
        harness.save(engine, root / f"global_step_{step}" / "actor", global_step=step, max_ckpt_to_keep=2)
        harness.on_rank_zero((root / f"global_step_{step}" / "note.txt").touch)
    actors = sorted(path.parent.name for path in root.glob("global_step_*/actor"))
    expect(actors == ["global_step_10", "global_step_20"], f"after three saves that keep two: {actors}")
    expect((root / "global_step_5" / "note.txt").exists(), "retention removed a file of somebody else")


def remote_copy(harness: EngineHarness) -> None:
    """With hdfs_path a copy is written there; loading brings it back, and removes only what it brought."""
    engine = harness.build()
    local, remote, back = (str(harness.folder / name) for name in ("local", "remote", "back"))
    harness.save(engine, Path(local), hdfs_path=remote)
    harness.train(engine, harness.batch)
    other = harness.build()
    other.load_checkpoint(back, hdfs_path=remote, del_local_after_load=True)
    expect(not Path(back).exists() and Path(remote).exists(), "the brought copy stayed, or the remote one went")
    other.load_checkpoint(local)
    expect(Path(local).exists(), "load_checkpoint removed a checkpoint that was local to begin with")


class _watched_torch_load:
    """Notes calls of torch.load that would run code from the file."""

    def __enter__(self) -> list[str]:
        self.found: list[str] = []
        self.plain = torch.load

        def watched(*args: Any, **kwargs: Any) -> Any:
            # A tensor that ranks send each other unpickles itself by torch.load; that is no file.
            sent = sys._getframe(1).f_code.co_name == "_load_from_bytes"
            if kwargs.get("weights_only") is False and not sent:
                self.found.append(str(args[:1]))
            return self.plain(*args, **kwargs)

        torch.load = watched
        return self.found

    def __exit__(self, *exc: object) -> None:
        torch.load = self.plain
