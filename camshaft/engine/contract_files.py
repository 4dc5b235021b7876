"""Rules of the engine contract about what reaches the disk and what leaves for a rollout."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from camshaft.engine.base import StepContext
from camshaft.engine.lab import Lab, close, same_bits
from camshaft.engine.plain import plain_outputs
from camshaft.rules import expect, expect_error


def weights_have_hugging_face_names(lab: Lab) -> None:
    """named_weights are full tensors under Hugging Face names; in plain transformers they give the same numbers."""
    engine = lab.build()
    lab.train(engine, lab.batch)
    model: Any = lab.plain_model(engine, "causal_lm")
    found = lab.infer(engine, StepContext(outputs=("log_probs",)))["log_probs"]
    close(found, plain_outputs(model, lab.batch, "causal_lm")["log_probs"], lab.tolerance, "log_probs of the weights")


def resume_is_bitwise(lab: Lab) -> None:
    """Save, throw the engine away, load into a new one: weights and the next steps are the same bits."""
    changes: dict[str, Any] = {"override_config": {"attention_dropout": 0.1}, "micro_batch_size": 3}
    engine = lab.build(**changes)
    for _ in range(2):
        lab.train(engine, lab.batch)
        engine.lr_scheduler_step()
    path = lab.folder / "ckpt" / "global_step_2" / "actor"
    lab.save(engine, path, global_step=2)
    on = [lab.train(engine, lab.batch) for _ in range(2)]
    again = lab.build(**changes)
    with _watched_torch_load() as unsafe:
        again.load_checkpoint(str(path))
    expect(not unsafe, "load_checkpoint called torch.load with weights_only=False")
    after = [lab.train(again, lab.batch) for _ in range(2)]
    told, wanted = ([(step.loss, step.grad_norm) for step in steps] for steps in (after, on))
    expect(told == wanted, f"(loss, norm) of the steps after loading: {told}, without a stop: {wanted}")
    same_bits(lab.weights(again), lab.weights(engine), "weights two steps after loading")


def half_a_checkpoint_is_none(lab: Lab) -> None:
    """A checkpoint with a missing, shortened or changed file is refused by the file's name."""
    engine = lab.build()
    whole = lab.folder / "whole"
    lab.save(engine, whole)
    leftovers = [path.name for path in lab.folder.iterdir() if path.name not in ("model", "whole")]
    leftovers = lab.of_all_ranks(leftovers)[0]
    expect(not leftovers, f"save_checkpoint left {leftovers} behind")
    for number, path in enumerate(sorted(path for path in whole.rglob("*") if path.is_file())):
        broken = lab.folder / f"broken{number}"
        victim = broken / path.relative_to(whole)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        lab.on_rank_zero(lambda b=broken, v=victim: (shutil.copytree(whole, b), v.unlink()))
        expect_error(
            lambda b=broken: engine.load_checkpoint(str(b)), path.name, f"loaded a checkpoint without {path.name}"
        )
        if path.name == "manifest.json":
            continue
        lab.on_rank_zero(lambda v=victim, c=content: v.write_bytes(c))
        expect_error(lambda b=broken: engine.load_checkpoint(str(b)), path.name, f"loaded a damaged {path.name}")
    expect_error(lambda: engine.load_checkpoint(str(lab.folder / "nowhere")), "nowhere", "loaded what is not there")


def retention(lab: Lab) -> None:
    """max_ckpt_to_keep removes the oldest global_step_<n> folders of the same role, and nothing else."""
    engine = lab.build()
    root = lab.folder / "run"
    for step in (5, 10, 20):
        lab.save(engine, root / f"global_step_{step}" / "actor", global_step=step, max_ckpt_to_keep=2)
        lab.on_rank_zero((root / f"global_step_{step}" / "note.txt").touch)
    actors = sorted(path.parent.name for path in root.glob("global_step_*/actor"))
    expect(actors == ["global_step_10", "global_step_20"], f"after three saves that keep two: {actors}")
    expect((root / "global_step_5" / "note.txt").exists(), "retention removed a file of somebody else")


def remote_copy(lab: Lab) -> None:
    """With hdfs_path a copy is written there; loading brings it back, and removes only what it brought."""
    engine = lab.build()
    local, remote, back = (str(lab.folder / name) for name in ("local", "remote", "back"))
    lab.save(engine, Path(local), hdfs_path=remote)
    lab.train(engine, lab.batch)
    other = lab.build()
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
