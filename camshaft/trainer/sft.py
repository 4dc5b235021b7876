"""Supervised fine-tuning: the classic loop on any engine, without a controller.

    SFTTrainer(config).fit(tracking)

One optimizer step per batch, cross-entropy over the trained tokens, the mean taken over the whole batch
however it is cut. At the end the model is written as a Hugging Face folder.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from camshaft.algorithms import Counts, sft_loss
from camshaft.checkpoint import CheckpointManager, Saved, check_export_path, export_hugging_face
from camshaft.config import SFTConfig, sft_engine
from camshaft.data import SFTOptions, StatefulLoader, load_sft
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, build_engine
from camshaft.models.loader import load_tokenizer
from camshaft.tracking import Tracking
from camshaft.trainer.session import run_length, told_resume


def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    """Cross-entropy of the trained tokens."""
    mask = data.ragged("loss_mask")
    counts = Counts(mask.values, mask.lengths.to(mask.values.device), ctx["num_tokens"], ctx["num_sequences"])
    return sft_loss(predictions["log_probs"].values, counts), ctx


class SFTTrainer:
    """One run."""

    def __init__(self, config: SFTConfig):
        self.config = config
        check_export_path(config.export_path())
        self.tokenizer: Any = load_tokenizer(config.model.path, config.model.trust_remote_code)
        self.loader = StatefulLoader(
            self._rows(config.data.train_files, config.data.train_max_samples),
            config.data.train_batch_size,
            total_epochs=config.trainer.total_epochs,
            shuffle=config.data.shuffle,
            seed=config.data_seed(),
        )
        self.val_rows = self._rows(config.data.val_files, -1) if config.data.val_files else None
        self.total_steps = run_length(config.trainer, self.loader)
        self.engine = build_engine(config.strategy, sft_engine(config, self.total_steps))
        self.engine.set_loss_fn(loss_fn)
        self.checkpoints = CheckpointManager(config.trainer.default_local_dir, config.trainer.default_hdfs_dir)
        self.global_step = 0

    def _rows(self, paths: tuple[str, ...], most: int) -> DataProto:
        data = self.config.data
        options = SFTOptions(
            max_length=data.max_length,
            truncation=data.truncation,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
        )
        return load_sft([Path(p) for p in paths], self.tokenizer, options, None if most == -1 else most).batch

    # -- the loop ---------------------------------------------------------------------------------

    def prepare(self) -> Saved | None:
        """Build the model and, if there is something to resume from, load it."""
        self.engine.init_model()
        saved = self.checkpoints.latest() if self.config.trainer.resume_mode == "auto" else None
        if saved is not None:
            self.engine.load_checkpoint(saved.role("model"))
            self.loader.load_state_dict(saved.state["loader"])
            self.global_step = saved.step
            told_resume(saved, self.total_steps)
        if self.config.trainer.resume_mode == "disable":
            self.checkpoints.put_aside(after=0)
        return saved

    def fit(self, tracking: Tracking) -> dict[str, float]:
        """Train to the end, then write the Hugging Face folder; returns the metrics of the last step."""
        trainer = self.config.trainer
        metrics: dict[str, float] = {}
        for batch in self.loader:
            if self.global_step >= self.total_steps:
                break
            self.global_step += 1
            metrics = self.step(batch)
            last = self.global_step == self.total_steps or self.loader.exhausted
            if (
                self.val_rows is not None
                and trainer.test_freq > 0
                and (last or self.global_step % trainer.test_freq == 0)
            ):
                metrics |= self.validate(self.val_rows)
            tracking.log(metrics, step=self.global_step)
            if trainer.save_freq > 0 and (last or self.global_step % trainer.save_freq == 0):
                self.save()
        export_hugging_face(
            self.engine.named_weights(),
            self.config.model.path,
            self.config.export_path(),
            self.config.model.override_config,
            self.config.model.trust_remote_code,
        )
        return metrics

    def step(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step."""
        start, rate = time.perf_counter(), self.engine.learning_rate
        with self.engine.train_mode():
            result = self.engine.train_batch(batch)
        self.engine.lr_scheduler_step()
        seconds = time.perf_counter() - start
        return {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": rate,
            "train/skipped_steps": float(result.skipped),
            "timing_s/step": seconds,
            "perf/throughput": len(batch["input_ids"].values) / seconds,
        }

    def validate(self, rows: DataProto) -> dict[str, float]:
        """Cross-entropy per token on held-out rows."""
        total, count = 0.0, 0
        with self.engine.eval_mode():
            for batch in rows.split(self.config.data.train_batch_size):
                found = self.engine.infer_batch(batch, StepContext(outputs=("log_probs",)))
                mask = batch["loss_mask"].values
                total -= float(found["log_probs"].values[mask.to(found["log_probs"].values.device)].double().sum())
                count += int(mask.sum())
        return {"val/loss": total / count}

    def save(self) -> None:
        """All state of the run, whole or not at all."""
        roles = {"model": partial(self.engine.save_checkpoint, global_step=self.global_step)}
        keep = {"model": self.config.trainer.max_ckpt_to_keep}
        self.checkpoints.save(self.global_step, roles, {"loader": self.loader.state_dict()}, keep)
