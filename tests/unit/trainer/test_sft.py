import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import sft_args
from transformers import AutoModelForCausalLM

from camshaft.config import load_sft
from camshaft.dataproto import DataProto
from camshaft.errors import CheckpointError
from camshaft.trainer.metrics import StepMetrics
from camshaft.trainer.supervised import SFTTrainer


def trainer_of(folder: Path, **overrides: Any) -> SFTTrainer:
    args = sft_args(folder, {"data.val_files": folder / "data" / "sft_heldout.parquet", **overrides})
    trainer = SFTTrainer(load_sft(args))
    trainer.prepare()
    return trainer


def learn(trainer: SFTTrainer, batch: DataProto) -> dict[str, float]:
    return trainer.step(batch, StepMetrics(trainer.status))


def oracle_loss(model: Any, rows: DataProto) -> float:
    """Return the cross-entropy per trained token, one row at a time."""
    total, count = 0.0, 0
    for ids, mask in zip(rows["input_ids"].rows(), rows["loss_mask"].rows(), strict=True):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        total -= float(log_probs.gather(-1, ids[1:, None])[mask[1:]].sum())
        count += int(mask.sum())
    return total / count


def test_losses_match_transformers_over_all_trained_tokens(tmp_path: Path) -> None:
    # 16 held-out rows in batches of 6: the mean of the batch means would differ.
    trainer = trainer_of(tmp_path, **{"data.train_batch_size": 6, "data.micro_batch_size_per_gpu": 4})
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert trainer.val_rows is not None
    assert trainer.evaluate(trainer.val_rows)["val/loss"] == pytest.approx(
        oracle_loss(model, trainer.val_rows), rel=1e-5
    )
    batch = next(iter(trainer.source))
    assert learn(trainer, batch)["train/loss"] == pytest.approx(oracle_loss(model, batch), rel=1e-5)


def test_a_step_trains_and_reports_its_learning_rate(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **{"optim.lr": 0.01, "optim.lr_warmup_steps": 2})
    batch = next(iter(trainer.source))
    steps = [learn(trainer, batch) for _ in range(3)]
    assert steps[0]["train/loss"] > steps[1]["train/loss"] > steps[2]["train/loss"]
    assert [step["train/lr"] for step in steps] == [0.005, 0.01, 0.01]
    assert steps[0]["train/skipped_steps"] == 0
    assert all(math.isfinite(step["train/grad_norm"]) and step["train/grad_norm"] > 0 for step in steps)


def test_the_log_tells_training_data_from_validation_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "camshaft.data"):
        trainer = trainer_of(tmp_path)
    assert trainer.val_rows is not None
    source: Any = trainer.source
    files = {"training": len(source.data), "validation": len(trainer.val_rows)}
    for message, (kind, count) in zip(caplog.messages, files.items(), strict=True):
        assert message.startswith(f"{kind} data: {count} sequences, ")
    assert caplog.messages[1].endswith(f"from {tmp_path}/data/sft_heldout.parquet")


def test_a_taken_export_folder_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        trainer_of(tmp_path, **{"trainer.export_path": tmp_path / "out"})


def test_the_model_folder_is_optional_and_removed_with_its_step(tmp_path: Path) -> None:
    contents = {"checkpoint.save_contents": "[model,optimizer,extra,hf_model]", "trainer.max_ckpt_to_keep": 1}
    trainer = trainer_of(tmp_path, **contents)
    batch = next(iter(trainer.source))
    for trainer.global_step in (1, 2):
        learn(trainer, batch)
        trainer.save()
    root = tmp_path / "sft"
    assert not (root / "global_step_1").exists()
    assert sorted(path.name for path in (root / "global_step_2").iterdir()) == ["model", "model_huggingface", "trainer"]
    exported: Any = AutoModelForCausalLM.from_pretrained(root / "global_step_2" / "model_huggingface")
    assert learn(trainer, batch)["train/loss"] == pytest.approx(oracle_loss(exported, batch), rel=1e-5)


def test_exports_contain_the_chat_template_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ mark }}{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}"
                    "{% if add_generation_prompt %}<|im_start|>a{% endif %}")  # fmt: skip
    own = trainer_of(tmp_path, **{"data.chat_template": file, "data.chat_template_kwargs": "{mark: ab}"})
    assert own.tokenizer.decode(next(iter(own.source))["input_ids"].rows()[0])[:2] == "ab"
    own.finish()
    exported = Path(own.export_path())
    assert (exported / "chat_template.jinja").read_text() == file.read_text()
    assert own.state()["tokenizer"] == str(tmp_path / "sft" / "tokenizer")
