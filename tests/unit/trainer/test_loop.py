"""A trainer that counts rows gets saving, resuming, stopping, validation and early ends from the loop."""

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from support.command_line import sft_args

from camshaft import storage
from camshaft.config import SFTConfig, load_sft
from camshaft.data import StatefulLoader
from camshaft.dataproto import DataProto
from camshaft.errors import ScoringAbandoned, WorkerError
from camshaft.stop import ENDED_BY_SIGNAL
from camshaft.tracking import Tracking
from camshaft.tracking.record import RunStatus
from camshaft.trainer.loop import TrainingLoop, run
from camshaft.trainer.metrics import StepMetrics
from camshaft.trainer.session import Extensions


class Tally:
    """A role without a model, which adds up numbers."""

    sum = 0.0

    def save_checkpoint(self, local_path: str, hdfs_path: str | None = None, global_step: int = 0) -> None:
        with storage.new_folder(Path(local_path), kind="tally", global_step=global_step) as work:
            (work / "sum").write_text(str(self.sum))

    def load_checkpoint(self, local_path: str) -> None:
        self.sum = float((Path(local_path) / "sum").read_text())

    def wait_for_checkpoint(self) -> None:
        return

    def has_finite_outputs(self) -> list[bool]:
        return [True]


class Counter(TrainingLoop[SFTConfig, DataProto, float]):
    """Adds up the numbers of its rows, and counts the rows."""

    def __init__(self, config: SFTConfig, status: RunStatus):
        numbers = DataProto.from_dict({"number": torch.arange(10)})
        source = StatefulLoader(numbers, 2, total_epochs=None, seed=config.data_seed())
        self.tally: Any = Tally()
        self.rows = 0
        super().__init__(config, source, config.trainer.total_training_steps or 0, {"tally": self.tally}, status, {})

    def init_models(self) -> None:
        return

    def collect(self, inputs: DataProto, metrics: StepMetrics) -> float:
        self.rows += len(inputs)
        return float(inputs["number"].sum())

    def step(self, batch: float, metrics: StepMetrics) -> dict[str, float]:
        self.tally.sum += batch
        return {"train/sum": self.tally.sum, "train/rows": float(self.rows)}

    def validate(self, tracking: Tracking) -> dict[str, float]:
        return {"val/sum": self.tally.sum}

    def keep(self) -> dict[str, int | None]:
        return {"tally": 2}

    def exports(self) -> dict[str, Callable[[str, str | None], None]]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rows = state["rows"]


@contextlib.contextmanager
def counter(config: SFTConfig, extensions: Extensions, trainer_class: type[Counter] = Counter) -> Iterator[Counter]:
    with RunStatus(config.trainer.default_local_dir) as status, trainer_class(config, status) as trainer:
        trainer.on_step = extensions.on_step
        yield trainer


def config_of(folder: Path, run_folder: str = "run", steps: int = 7, **overrides: Any) -> SFTConfig:
    keys = {
        "data.val_files": folder / "data" / "sft_heldout.parquet",
        "trainer.test_freq": 3,
        "trainer.save_freq": 2,
        "trainer.total_epochs": "null",
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": folder / run_folder,
        "trainer.resume_mode": "auto",
    }
    return load_sft(sft_args(folder, {**keys, **overrides}))


def logged(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the metrics of the trainer in `metrics.jsonl` by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (row["step"], {name: value for name, value in row.items() if name.startswith(("train/", "val/"))})
        for row in rows
    ]


def saved_steps(folder: Path) -> list[int]:
    """Return all steps that have been saved, according to the log."""
    return [int(step) for step in re.findall(r"saved \S+/global_step_(\d+):", (folder / "log.txt").read_text())]


def test_a_trainer_gets_validation_and_checkpoints_from_the_loop(tmp_path: Path) -> None:
    best: dict[str, Any] = {"trainer.best_metric": "val/sum", "trainer.best_metric_mode": "max"}
    assert run(config_of(tmp_path, **best), counter) == 0
    rows = logged(tmp_path / "run")
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[4][1] == {"train/sum": 45.0, "train/rows": 10.0}, "an epoch of five steps has each number once"
    assert [step for step, sums in rows if "val/sum" in sums] == [3, 6, 7]
    assert saved_steps(tmp_path / "run") == [2, 3, 4, 6, 7], "validations with a new best sum are saved too"
    assert (tmp_path / "run" / "best_checkpointed_iteration.txt").read_text() == "7"
    assert sorted(path.name for path in (tmp_path / "run").glob("global_step_*")) == ["global_step_6", "global_step_7"]


def test_a_stopped_and_resumed_trainer_logs_what_an_unstopped_one_does(tmp_path: Path) -> None:
    def stop(step: int, batch: DataProto, metrics: Mapping[str, float]) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    assert run(config_of(tmp_path), counter, Extensions(on_step=(stop,))) == ENDED_BY_SIGNAL + signal.SIGTERM
    assert saved_steps(tmp_path / "run") == [2, 3]
    assert run(config_of(tmp_path), counter) == 0
    assert run(config_of(tmp_path, "other"), counter) == 0
    assert logged(tmp_path / "run") == logged(tmp_path / "other")


def test_an_abandoned_step_returns_its_rows_to_the_source(tmp_path: Path) -> None:
    class Abandoning(Counter):
        def collect(self, inputs: DataProto, metrics: StepMetrics) -> float:
            if self.global_step == 6:
                signal.raise_signal(signal.SIGTERM)
                raise ScoringAbandoned("scoring takes too long")
            return super().collect(inputs, metrics)

    status = run(config_of(tmp_path), lambda config, extensions: counter(config, extensions, Abandoning))
    assert status == ENDED_BY_SIGNAL + signal.SIGTERM
    assert saved_steps(tmp_path / "run") == [2, 4, 5]
    assert run(config_of(tmp_path), counter) == 0
    assert run(config_of(tmp_path, "other"), counter) == 0
    assert logged(tmp_path / "run") == logged(tmp_path / "other")


def test_a_trainer_ends_a_run_early(tmp_path: Path) -> None:
    finished: list[int] = []

    class Impatient(Counter):
        def after_step(self, metrics: dict[str, float]) -> None:
            self.is_over = self.global_step == 3

        def finish(self) -> None:
            finished.append(self.global_step)

    assert run(config_of(tmp_path), lambda config, extensions: counter(config, extensions, Impatient)) == 0
    assert (logged(tmp_path / "run")[-1][0], finished) == (3, [3])
    assert saved_steps(tmp_path / "run") == [2, 3]


def test_a_failed_run_waits_for_the_checkpoints_of_all_roles(tmp_path: Path) -> None:
    ended, critic, checkpoints = Mock(), Mock(), Mock()
    ended.wait_for_checkpoint.side_effect = WorkerError("its workers have ended")
    trainer = Counter(config_of(tmp_path), RunStatus(tmp_path))
    trainer.trained, trainer.checkpoints = {"actor": ended, "critic": critic}, checkpoints
    trainer.finish_saving(failed=True)
    critic.wait_for_checkpoint.assert_called_once()
    checkpoints.bind.assert_called_once()
