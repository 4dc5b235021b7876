"""Reward model training: losses, weights and scores match transformers for any micro-batches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.command_line import rm_args
from support.processes import start_fork_server
from support.reward_models import hf_scores, make_tiny_reward_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from camshaft.columns import COLUMNS
from camshaft.config import load_rm
from camshaft.controller.local import PRELOAD
from camshaft.data.tables import read_rows, write_parquet
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import CheckpointError
from camshaft.trainer.supervised import RMTrainer

pytestmark = pytest.mark.timeout(200)

EXACT: dict[str, Any] = {
    "fsdp_config.model_dtype": "float64",
    "fsdp_config.mixed_precision.reduce_dtype": "null",
    "optim.lr_scheduler_type": "constant",
    "optim.lr_warmup_steps": 0,
    "data.margin_key": "lead",
    "center_rewards_coefficient": 0.01,
}
STEPS, LR = 3, 1e-3


class Recorder:
    """A tracker that records all metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append(dict(metrics))


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with a reward model `start`, pairs with margins in `pairs.parquet`, and odd `heldout.parquet`."""
    rm_args(home)
    make_tiny_reward_model(home / "start")
    for name, split, count in (("pairs", "train", 24), ("heldout", "heldout", 7)):
        rows = read_rows(home / "data" / f"preference_{split}.parquet", ["prompt", "chosen", "rejected"]).rows
        write_parquet(home / f"{name}.parquet", [{**row, "lead": i % 3 / 2} for i, row in enumerate(rows[:count])])
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.llama.modeling_llama")
    return home


def trainer_of(home: Path, folder: Path, **overrides: Any) -> RMTrainer:
    paths = {"data.train_files": home / "pairs.parquet", "data.val_files": home / "heldout.parquet"}
    run = {"trainer.default_local_dir": folder, "model.path": home / "start", "trainer.test_freq": 2, "optim.lr": LR}
    return RMTrainer(load_rm(rm_args(home, {**paths, **run, **overrides})))


def trained(home: Path, folder: Path, **overrides: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return (metrics of the steps, weights of the exported model)."""
    recorder = Recorder()
    with trainer_of(home, folder, **overrides) as trainer:
        trainer.prepare()
        trainer.fit(recorder)  # pyright: ignore[reportArgumentType]
    exported = AutoModelForSequenceClassification.from_pretrained(folder / "huggingface", dtype=torch.float64)
    return recorder.steps, dict(exported.state_dict())


def scores_of(model: Any, ids: Ragged) -> Tensor:
    """Return (B,) logits of transformers, one row at a time."""
    return torch.stack([model(row[None]).logits[0, 0] for row in ids.rows()])


def oracle_terms(model: Any, pairs: DataProto) -> tuple[Tensor, Tensor]:
    """Return (loss of each pair, score difference of each pair)."""
    chosen, rejected = scores_of(model, pairs["chosen"]), scores_of(model, pairs["rejected"])
    lead = chosen - rejected
    return torch.log1p(torch.exp(pairs["margin"] - lead)) + 0.01 * (chosen + rejected) ** 2, lead


@pytest.fixture(scope="module")
def oracle(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the results of `trained`, computed with torch and transformers without packing or micro-batches."""
    trainer = trainer_of(home, tmp_path_factory.mktemp("oracle"), **EXACT)
    model: Any = AutoModelForSequenceClassification.from_pretrained(home / "start", dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    steps = []
    for batch in trainer.source:
        losses, lead = oracle_terms(model, batch)
        optimizer.zero_grad()
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics = {
            "loss": losses.mean(),
            "accuracy": (lead > 0).double().mean(),
            "margin": lead.mean(),
            "grad_norm": norm,
        }
        steps.append({f"train/{name}": float(value.detach()) for name, value in metrics.items()})
        if len(steps) == STEPS:
            break
    assert trainer.val_rows is not None
    with torch.no_grad():
        losses, lead = oracle_terms(model, trainer.val_rows)
    steps[-1] |= {"val/loss": float(losses.mean()), "val/accuracy": float((lead > 0).double().mean())}
    return steps, dict(model.state_dict())


RANKS: dict[str, Any] = {"strategy": "fsdp", "trainer.n_gpus_per_node": 2}


@pytest.mark.parametrize(
    "cut",
    [
        {"data.micro_batch_size_per_gpu": 8},
        {"data.micro_batch_size_per_gpu": 3},
        {"data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 64},
        pytest.param(RANKS, marks=pytest.mark.slow),
        pytest.param(
            {**RANKS, "ulysses_sequence_parallel_size": 2, "data.micro_batch_size_per_gpu": 1}, marks=pytest.mark.slow
        ),
    ],
    ids=["whole", "three pairs", "tokens", "two ranks", "a sequence on two ranks"],
)
def test_a_run_matches_transformers_for_any_split(
    cut: dict[str, Any], oracle: tuple[list[dict[str, float]], dict[str, Tensor]], home: Path, tmp_path: Path
) -> None:
    expected, weights = oracle
    steps, actual = trained(home, tmp_path, **{**EXACT, **cut})
    assert len(steps) == STEPS
    for step, reference in zip(steps, expected, strict=True):
        # The other metrics are summed in float32.
        assert {name: step[name] for name in reference} == pytest.approx(reference, rel=1e-6)
        assert step["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-9)
    assert actual.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-6, atol=1e-9, msg=name)


def test_pairs_have_the_columns_of_the_table(home: Path, tmp_path: Path) -> None:
    trainer = trainer_of(home, tmp_path)
    trainer.prepare()
    rows = trainer.val_rows
    assert rows is not None
    batch = rows.union(trainer.model.compute_scores(rows))
    assert set(batch.columns) == {"chosen", "rejected", "margin", "chosen_scores", "rejected_scores"}
    for name, value in batch.columns.items():
        kind, dtype = ("ragged", value.values.dtype) if isinstance(value, Ragged) else ("tensor", value.dtype)
        assert (kind, str(dtype)) == (COLUMNS[name].kind, f"torch.{COLUMNS[name].dtype}"), name


def test_a_new_head_depends_on_the_seed(home: Path, tmp_path: Path) -> None:
    def head(seed: int) -> Tensor:
        overrides = {
            "model.path": home / "actor",
            "trainer.seed": seed,
            "trainer.total_training_steps": 1,
            "optim.lr": 1e-9,
        }
        return trained(home, tmp_path / str(seed), **overrides)[1]["score.weight"]

    first, other = head(1), head(2)
    assert first.shape == (1, 32)
    assert first.abs().sum() > 0
    assert not torch.allclose(first, other)


def test_an_adapter_is_trained_with_the_head_and_merged(home: Path, tmp_path: Path) -> None:
    lora = {"model.path": home / "actor", "model.lora_rank": 4, "optim.lr": 1e-2, "trainer.total_training_steps": 3}
    _, weights = trained(home, tmp_path, **lora)
    folder = tmp_path / "huggingface"
    base: Any = AutoModelForSequenceClassification.from_pretrained(home / "actor", num_labels=1)
    assert not torch.allclose(
        base.model.layers[0].mlp.up_proj.weight.double(), weights["model.layers.0.mlp.up_proj.weight"]
    )
    adapted: Any = peft.PeftModel.from_pretrained(base, folder / "lora_adapter")
    rows = [[5, 6, 7], [8, 9, 10, 11]]
    with torch.no_grad():
        beside = torch.stack([adapted(torch.tensor([row])).logits[0, 0] for row in rows])
    torch.testing.assert_close(beside, hf_scores(folder, rows), rtol=1e-4, atol=1e-5)


def test_a_taken_export_folder_is_an_error_before_training(home: Path, tmp_path: Path) -> None:
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        trainer_of(home, tmp_path)
