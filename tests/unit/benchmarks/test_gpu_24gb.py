"""`benchmarks/gpu_24gb.py` without a GPU: the limit of the memory, peaks by phase, the search, and the page."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu_24gb
from gpu_24gb import GIB, PHASES, SETUPS

from camshaft.config import PPOConfig, compose
from camshaft.device import memory_info

BENCHMARKS = Path(gpu_24gb.__file__).parent


@pytest.mark.parametrize("expected", range(8))
def test_the_search_finds_the_last_number_that_fits(expected: int) -> None:
    asked: list[int] = []
    assert gpu_24gb.largest(lambda count: asked.append(count) or count <= expected, most=7) == expected
    assert len(asked) <= 3 + 1


def test_a_small_card_limits_the_allocator_and_reports_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 15 * GIB)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda *_: 15 * GIB)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda *_: 11 * GIB)
    with gpu_24gb.small_card(20 * GIB, "cuda"):
        assert memory_info(torch.device("cuda")) == (9 * GIB, 20 * GIB)  # 5 of the card, 4 that the allocator holds
    assert limits == [(0.25, 0)]  # the function takes no device without an index
    assert torch.cuda.mem_get_info()[1] == 80 * GIB


def test_the_peak_of_a_phase_includes_the_phases_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: max(seen, default=0))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 2 * max(seen, default=0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: seen.clear())
    peaks = gpu_24gb.Peaks(SimpleNamespace(phase=None), "cuda")
    seen.append(90)  # before any phase
    with peaks.phase("gen"):
        seen.append(10)
        with peaks.phase("sync"):
            seen.append(40)
        seen.append(20)
    with peaks.phase("update_actor"):
        seen.append(30)
    assert peaks.peaks == {"sync": 40, "gen": 40, "update_actor": 30}
    assert peaks.reserved == 180


@pytest.mark.parametrize(("layers", "weights"), [(None, "bfloat16"), (20, "float32")])
def test_both_runs_are_valid_on_a_gpu(tmp_path: Path, layers: int | None, weights: str) -> None:
    settings = gpu_24gb.settings(SETUPS["24 GB"], tmp_path, layers, "cuda")
    (config,) = compose([f"{key}={value}" for key, value in settings.items()], PPOConfig)
    actor = config.actor_rollout_ref.actor
    assert (actor.fsdp_config.model_dtype, actor.fsdp_config.compute_dtype()) == (weights, "bfloat16")
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 128
    model = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    expected = (2560, 36, 32, 8, 128, 9728) if layers is None else (2048, 20, 16, 8, 128, 6144)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert tuple(model[name] for name in (*names, "intermediate_size")) == expected


def results(out: Path, device: str) -> gpu_24gb.Results:
    return gpu_24gb.Results(Namespace(tiny=False, out=str(out), device=device))


def test_a_page_compares_forecast_and_measured_peaks(tmp_path: Path) -> None:
    peaks = dict.fromkeys(PHASES, 21 * GIB)
    seconds = dict.fromkeys((*PHASES, "step"), 1.0)
    measured = {"peaks": dict.fromkeys(PHASES, 20 * GIB), "reserved": 22 * GIB, "seconds": seconds}
    first = results(tmp_path / "out", "cuda")
    first.forecasts = {"lora": {"peaks": peaks, "fits": True}, "20": {"peaks": peaks, "fits": False}}
    first.report()
    assert "Not measured yet" in (tmp_path / "out.md").read_text(encoding="utf-8")
    second = results(tmp_path / "out", "cpu")  # reads the forecasts
    second.measured = {"lora": measured | {"tokens_per_second": 5.0}, "20": {"failed": "out of memory"}}
    second.report()
    page = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert page.count("| 21.00 | 20.00 | +5.0% |") == len(PHASES)
    assert page.count("| forecast not to fit |  | out of memory |  |") == 1
    assert "22.00 GiB reserved" in page


@pytest.mark.slow
def test_the_script_forecasts_and_runs_both_trainings(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_24gb.py"), "--tiny", "--device", "cpu"]
    process = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=900
    )  # the forecasts and the runs are processes
    assert process.returncode == 0, process.stderr
    record: dict[str, Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert {key: entry["fits"] for key, entry in record["forecasts"].items()} == {"lora": True, "1": True, "2": False}
    assert {"lora", "1", "2"} <= record["measured"].keys()
    assert all(entry["tokens_per_second"] > 0 for entry in record["measured"].values())
