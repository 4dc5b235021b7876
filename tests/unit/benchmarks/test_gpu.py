"""`benchmarks/gpu.py` without a GPU: it runs, its two sides agree, and parts that need CUDA report that."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import forked_process
from torch._C._autograd import DeviceType

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu
import gpu_model
import gpu_parts
import machine
import plan_gpu
import roofline
from plan import write_inputs

from camshaft.roles import ActorWorker

BENCHMARKS = Path(gpu_parts.__file__).parent
TINY, LARGE = gpu_model.SIZES["tiny"], gpu_model.SIZES["1.5B"]


def started(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return the JSON results and the page of a run of all parts."""
    out = tmp_path_factory.mktemp("gpu") / "results"
    small = ["--model", "tiny", "--device", "cpu", "--rounds", "1", "--datasheet", "2"]
    small += ["--set", "actor_rollout_ref.model.enable_gradient_checkpointing=false"]
    process = started(*small, "--out", str(out))
    assert process.returncode == 0, process.stderr
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert process.stdout.strip() in page
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8")), page


@pytest.mark.slow
def test_an_update_reports_its_share_of_both_rates(results: tuple[dict[str, Any], str]) -> None:
    rows = {row["what"]: row for row in results[0]["rows"] if row["part"] == "update"}
    assert rows.keys() == {"camshaft", "textbook"}
    for row in rows.values():
        assert row["of_matmul_rate"] * row["matmul_tflops"] == pytest.approx(row["of_datasheet"] * 2)
        assert 0 < row["of_matmul_rate"] < 1
    assert (rows["camshaft"]["goal"], rows["textbook"]["goal"]) == ("MFU of at least 45 %", "")


@pytest.mark.slow
def test_both_sides_compute_the_same(results: tuple[dict[str, Any], str]) -> None:
    actual, expected = (row for row in results[0]["rows"] if row["part"] == "update")
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_cuda_metrics_are_absent_without_cuda(results: tuple[dict[str, Any], str]) -> None:
    rows = [row for row in results[0]["rows"] if row["part"] in ("memory", "syncs")]
    rows += [row for row in results[0]["rows"] if row["what"] == "enforce_eager=False"]
    assert len(rows) == len(TINY.vocabularies) + 2 + 1
    assert all(row["measured"] == gpu_parts.NEEDS_CUDA for row in rows)
    assert not any(key.endswith("mib") or key == "seconds" for row in rows for key in row)
    assert sum(row.get("micro_batches", 0) > 1 for row in rows) == 2  # every device has the marks


@pytest.mark.slow
def test_generation_is_measured_on_every_device(results: tuple[dict[str, Any], str]) -> None:
    (row,) = (row for row in results[0]["rows"] if row["what"] == "enforce_eager=True")
    assert row["ms"] * (TINY.answer - 1) == pytest.approx(1000 * row["seconds"])
    assert row["gigabytes"] == pytest.approx(gpu_parts.decode_work(TINY, "float32").bytes / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--parts", "update,speed"], "unknown: speed; use update"),
        (["--device", "cpu", "--against", "trl"], "unknown: trl; use textbook"),
        (["--device", "cpu", "--set", "x"], "--set takes KEY=VALUE"),
    ],
)
def test_an_unknown_argument_is_rejected(arguments: list[str], message: str) -> None:
    process = started("--model", "tiny", *arguments)
    assert process.returncode == 2
    assert message in process.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without CUDA")
def test_without_a_device_the_error_suggests_a_command() -> None:
    process = started()
    assert process.returncode == 2
    assert "--model tiny --device cpu" in process.stderr


# -- counts ---------------------------------------------------------------------------------------


def test_the_large_model_has_the_shape_of_the_goal() -> None:
    shape = LARGE.shape
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads) == (1536, 28, 12, 2)
    assert (shape.intermediate, shape.vocab_size) == (8960, 151_936)
    rows = [gpu_model.rows_of(LARGE, seed) for seed in range(20)]
    assert gpu_model.mean_tokens(rows) / LARGE.rows == pytest.approx(4096, rel=0.05)
    assert (LARGE.batch, LARGE.prompt, LARGE.answer) == (256, 512, 256)


def test_the_settings_of_the_large_model_are_a_config(tmp_path: Path) -> None:
    from camshaft_side import config

    gpu_model.make_model(tmp_path, replace(TINY, longest_response=LARGE.longest))
    actual = config(tmp_path, **gpu_model.settings(LARGE, "cuda", "bfloat16"))
    actor = actual.actor_rollout_ref.actor
    assert (actor.strategy, actor.fsdp_config.model_dtype, actor.fsdp_config.compute_dtype()) == (
        "fsdp",
        "float32",
        "bfloat16",
    )
    assert actual.actor_mini_batch() == LARGE.rows == len(gpu_model.rows_of(LARGE, seed=1))


def test_update_flops_count_the_prompt_of_each_row() -> None:
    rows = gpu_model.rows_of(TINY, seed=3)
    groups = [roofline.Group(len(p), [len(r)]) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    one_by_one = sum((roofline.evaluation(TINY.shape, [group]) for group in groups), roofline.NOTHING)
    assert gpu_model.work_of(TINY, rows, "bfloat16").operations == pytest.approx(3 * one_by_one.operations)


def test_generation_bytes_are_weights_plus_kv_of_real_lengths() -> None:
    size, shape = LARGE, LARGE.shape
    weights = shape.weights_of_layers() + shape.hidden * shape.vocab_size
    of_position = 2 * shape.layers * shape.hidden * shape.kv_heads // shape.heads
    expected = 0
    for step in range(1, size.answer):  # prefill computes the first token
        length = size.prompt + step  # position of the token that this step computes
        expected += weights + size.batch * of_position * length  # earlier positions are read, this one is written
    assert gpu_parts.decode_work(size, "bfloat16").bytes == pytest.approx(2 * expected, rel=1e-9)


def test_waits_are_those_inside_of_marks() -> None:
    cpu, cuda = DeviceType.CPU, DeviceType.CUDA

    def event(name: str, start: float, stop: float, *kernels: str, device: Any = cpu) -> Any:
        launched = [SimpleNamespace(name=kernel) for kernel in kernels]
        where = SimpleNamespace(start=start, end=stop)
        return SimpleNamespace(name=name, time_range=where, kernels=launched, device_type=device)

    events = [
        event("micro_batch", 10, 20),
        event("micro_batch", 30, 40),
        event("micro_batch", 0, 100, device=cuda),
        event("cudaStreamSynchronize", 15, 16),
        event("aten::copy_", 35, 36, "Memcpy DtoH (Device -> Pageable)"),
        event("aten::copy_", 37, 38, "Memcpy HtoD (Pinned -> Device)"),
        event("cudaLaunchKernel", 12, 13),
        event("cudaStreamSynchronize", 25, 26),
        event("Memcpy DtoH (Device -> Pageable)", 36, 37, device=cuda),
    ]
    assert gpu_parts.waits_inside(events) == ["cudaStreamSynchronize", "Memcpy DtoH (Device -> Pageable)"]


@pytest.mark.slow
def test_the_marks_are_in_a_trace(tmp_path: Path) -> None:
    from camshaft_side import ActorUpdate

    gpu_model.make_model(tmp_path, TINY)
    settings = {"actor_rollout_ref.actor.strategy": "reference"}  # leaves no process group behind
    actor = ActorUpdate(tmp_path, **(gpu_model.settings(TINY, "cpu", "float32") | settings))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with gpu_parts.marked() as passes, torch.profiler.profile(activities=activities) as profile:
        actor.update(gpu_model.rows_of(TINY, seed=1))
    events: Any = profile.events()
    assert sum(event.name == gpu_parts.MARK for event in events) == passes.count(0) >= 1
    assert len(passes) > passes.count(0), "each mini-batch must have several micro-batches"
    assert gpu_parts.waits_inside(events) == []


# -- code paths that only CUDA takes, simulated with counters -------------------------------------


class ReportsCuda(gpu_parts.Job):
    """A tensor that reports a CUDA device and computes on the CPU."""

    @property
    def on_cuda(self) -> bool:
        return True


@pytest.fixture
def job(tmp_path: Path) -> gpu_parts.Job:
    gpu_model.make_model(tmp_path, TINY)
    return ReportsCuda(TINY, tmp_path, "cpu", "bfloat16", roofline.Rates(1, 1e9, 1e9), rounds=1)


def test_memory_is_the_peak_minus_required_tensors(job: gpu_parts.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([7 << 20, 90 << 20, 7 << 20, 190 << 20])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    outputs = 2 * 4 * TINY.head_tokens
    for row, vocabulary_size, backward in zip(gpu_parts.memory_rows(job), TINY.vocabularies, (85, 185), strict=True):
        gradients = TINY.shape.hidden * (4 * TINY.head_tokens + 2 * vocabulary_size)  # of bfloat16
        assert row["gradients_mib"] == gradients / 2**20
        assert row["forward_mib"] == 2 - outputs / 2**20
        assert row["backward_mib"] == pytest.approx(backward - (outputs + gradients) / 2**20)
        assert row["measured"].startswith(f"2 MiB forward, {row['backward_mib']:.0f} with backward")


def test_generation_is_measured_with_and_without_graphs(job: gpu_parts.Job) -> None:
    rows = gpu_parts.decode_rows(job)
    assert [row["what"] for row in rows] == ["enforce_eager=True", "enforce_eager=False"]
    assert all(row["measured"].endswith(" tokens/s") for row in rows)


def test_decode_steps_report_their_share_of_both_bandwidths(job: gpu_parts.Job) -> None:
    row = gpu.beside_bandwidth(gpu_parts.decode_rows(job)[0], terabytes=4.8)
    bytes_per_second = gpu_parts.decode_work(TINY, "bfloat16").bytes / row["seconds"]
    assert row["of_bandwidth"] == pytest.approx(bytes_per_second / 4.8e12)
    assert row["of_copy_rate"] == pytest.approx(bytes_per_second / job.rates.copy)
    assert row["measured"].endswith("of the bound at the datasheet's 4.80 TB/s")
    missing = {"what": "enforce_eager=False", "measured": gpu_parts.NEEDS_CUDA}
    assert gpu.beside_bandwidth(missing, terabytes=4.8) == missing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling")
@pytest.mark.parametrize("waits", [False, True])
def test_a_rejected_cuda_wait_is_reported(job: gpu_parts.Job, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    original = ActorWorker._loss

    def loss(self: Any, *arguments: Any) -> Any:
        if waits and modes and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return original(self, *arguments)

    monkeypatch.setattr(ActorWorker, "_loss", loss)
    settings = gpu_model.settings(TINY, "cpu", "float32") | {"actor_rollout_ref.actor.strategy": "reference"}
    monkeypatch.setattr(gpu_parts, "settings", lambda *_: settings)
    by_trace, by_cuda = gpu_parts.syncs_rows(job)
    passes = by_trace["micro_batches"]
    assert passes > 1
    assert by_trace["measured"] == f"0 in {passes} micro-batches"
    report = "refused: called a synchronizing" if waits else f"nothing refused in {passes} micro-batches"
    assert by_cuda["measured"].startswith(report)
    assert modes == ["error", "default"] * (1 if waits else len(modes) // 2) != []


def test_update_time_on_cuda_includes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    loop = SimpleNamespace(update=lambda rows: calls.append("update") or {"loss": 1.0})
    seconds = gpu.timed_update(loop, None, "cuda")
    assert calls == ["update", "synchronize", "reset_peak_memory_stats", "update", "synchronize", "empty_cache"]
    assert (seconds["loss"], seconds["peak_gib"]) == (1.0, 3.0)


def test_the_page_has_every_goal_and_existing_tests() -> None:
    page = (BENCHMARKS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for part, goal in gpu.GOALS.items():
        lines = [row for row in rows if row[0].startswith(f"| {part}: ")]
        assert lines, part
        assert {row[1] for row in lines} == {goal}
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert len(named) >= 6
    assert all((BENCHMARKS.parent / name).is_file() for name in named), named


def test_a_gpu_is_named_before_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    assert machine.machine("cuda:0").startswith("NVIDIA H100, 80 GiB, 132 SMs, CUDA ")
    assert machine.machine("cuda").endswith(machine.machine())


def test_a_gpu_run_is_forecast_without_a_gpu(tmp_path: Path) -> None:
    write_inputs(tmp_path, **plan_gpu.SHAPES["tiny"])
    words = plan_gpu.arguments(tmp_path, "tiny", [])
    with forked_process() as executor:
        planned = executor.submit(plan_gpu.run_case, "plain", words, "forecast").result(timeout=300)
    rows = [row.split(" | ") for row in plan_gpu.compare("plain", None, planned)]
    assert [row[1] for row in rows][-2:] == ["actor update_actor", "actor save"]
    assert {row[3] for row in rows} == {"needs CUDA"}
    assert all(int(row[2]) > 0 for row in rows if row[1] == "actor update_actor")


@pytest.mark.slow
def test_forecasts_for_a_gpu_are_printed_without_one() -> None:
    command = [sys.executable, str(BENCHMARKS / "plan_gpu.py"), "--shape", "tiny", "--case", "plain"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "have no effect" not in process.stderr
    rows = [line.split(" | ") for line in process.stdout.splitlines() if line.startswith("| plain")]
    assert [row[1] for row in rows][-2:] == ["actor update_actor", "actor save"]
    if not torch.cuda.is_available():
        assert {row[3] for row in rows} == {"needs CUDA"}
