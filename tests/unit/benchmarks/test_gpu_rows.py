"""`benchmarks/gpu_rows.py` without a GPU: both sides of a row agree, and kernels, counts and the page are right."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dense_attention import dense_attention
from support.processes import forked_process
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import camshaft_side
import gpu_attention
import gpu_rows
from gpu_attention import Case
from gpu_model import QWEN3

from camshaft.config import SFTConfig, compose

BENCHMARKS = Path(gpu_rows.__file__).parent
FULL, LORA, SUPERVISED = gpu_rows.TINY


def task(row: gpu_rows.Row, folder: Path, side: str) -> dict[str, Any]:
    QWEN3[row.model].write(folder / side, row.length, "float32")
    where = {"folder": str(folder / side), "device": "cpu", "dtype": "float32"}
    return {"row": vars(row), "side": side, "rounds": 1, "profile": False, **where}


# -- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", gpu_rows.TINY, ids=str)
def test_both_sides_of_a_row_compute_the_same(row: gpu_rows.Row, tmp_path: Path) -> None:
    results = []
    for side in ("camshaft", "textbook"):
        with forked_process() as executor:
            results.append(executor.submit(gpu_rows.timed, task(row, tmp_path, side)).result(timeout=300))
    actual, expected = results
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert actual["tokens_per_second"] * actual["seconds"] == pytest.approx(2 * row.length)


@pytest.mark.parametrize("row", gpu_rows.TINY, ids=str)
def test_products_of_a_row_equal_those_that_torch_counts(row: gpu_rows.Row, tmp_path: Path) -> None:
    described = task(row, tmp_path, "textbook")
    loop = gpu_rows.Textbook(row, Path(described["folder"]), "cpu", "float32")
    with FlopCounterMode(display=False) as counter:
        loop.update(gpu_rows.rows_of(row, seed=0))
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    tokens, shape, passes = 2 * row.length, QWEN3[row.model], 2 if row.lora else 3
    last_tokens = 2 * shape.weights_of_head * 2 * passes  # they predict nothing, but the loop computes their logits
    named = loop.model.named_modules()
    adapters = [m for name, m in named if name.endswith(".default") and isinstance(m, torch.nn.Linear)]
    of_adapters = sum(2 * tokens * m.in_features * m.out_features * 4 for m in adapters)
    if row.lora:  # the loop recomputes the last product of each layer, but not that of its second adapter matrix
        of_adapters += 2 * tokens * shape.layers * shape.hidden * (shape.intermediate - row.lora)
    assert counted == row.products(recomputes=True) + last_tokens + of_adapters


def test_rows_have_the_published_shapes() -> None:
    sizes = {name: shape.weights_of_layers + shape.weights_of_head for name, shape in QWEN3.items()}
    assert (sizes["0.6B"], sizes["1.7B"], sizes["4B"]) == pytest.approx((0.596e9, 1.72e9, 4.02e9), rel=2e-3)
    goals = [(row.model, row.length, bool(row.lora), row.supervised, row.goal) for row in gpu_rows.ROWS]
    assert goals == [
        ("0.6B", 16_384, False, False, 1.5),
        ("0.6B", 65_536, False, False, 1.0),
        ("0.6B", 16_384, True, False, 1.5),
        ("0.6B", 16_384, False, True, 1.3),
        ("4B", 16_384, True, False, 1.3),
    ]


def test_the_page_states_each_row_with_its_goal_and_bound() -> None:
    page = (BENCHMARKS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| Qwen3-") and "tokens/s" in line]
    for cells, row in zip(lines, gpu_rows.ROWS, strict=True):
        published, memory = cells[1].replace(",", "").split(" tokens/s ")
        assert (float(published), memory, cells[2]) == (row.published, f"{row.gib} GiB", f"{row.goal} times")
        assert float(cells[4].removesuffix(" GiB")) < row.gib
        bound = 2 * row.length / row.bound(772e12, {"forward": 199e12, "backward": 227e12})
        assert float(cells[3].split()[0]) == pytest.approx(bound / row.published, abs=0.005)


@pytest.mark.parametrize("row", gpu_rows.ROWS, ids=str)
def test_the_settings_of_a_row_are_valid_on_a_gpu(row: gpu_rows.Row, tmp_path: Path) -> None:
    QWEN3[row.model].write(tmp_path, row.length, "bfloat16")
    if row.supervised:
        words = gpu_rows.supervised_settings(row, tmp_path, "cuda", "bfloat16")
        (config,) = compose([f"{key}={value}" for key, value in words.items()], SFTConfig)
        fsdp, most = config.fsdp_config, config.data.max_token_len_per_gpu
    else:
        actor = camshaft_side.config(
            tmp_path, **gpu_rows.policy_settings(row, "cuda", "bfloat16")
        ).actor_rollout_ref.actor
        fsdp, most = actor.fsdp_config, actor.ppo_max_token_len_per_gpu
    assert (fsdp.model_dtype, fsdp.compute_dtype()) == ("bfloat16" if row.lora else "float32", "bfloat16")
    assert most == row.length


def test_the_memory_of_a_row_is_forecast_without_a_gpu(tmp_path: Path) -> None:
    forecasts = []
    for name, row in (("full", FULL), ("supervised", SUPERVISED)):
        (tmp_path / name).mkdir()
        with forked_process() as executor:
            forecasts.append(executor.submit(gpu_rows.forecast, row, tmp_path / name).result(timeout=300))
    shape = QWEN3["tiny"]
    state = 16 * (shape.weights_of_layers + shape.weights_of_head) / 2**30  # weights, gradients and moments in float32
    assert state < forecasts[0] < 2 * state
    assert forecasts[1] > forecasts[0], "activations are stored"


def test_a_bound_is_the_time_of_products_and_attention() -> None:
    pairs, heads = FULL.length * (FULL.length + 1) // 2, QWEN3["tiny"]
    once = 2 * heads.layers * 4 * heads.heads * heads.head_dim * pairs
    expected = FULL.products(recomputes=True) / 2 + 2 * once / 3 + 2.5 * once / 5
    assert FULL.bound(2, {"forward": 3, "backward": 5}) == pytest.approx(expected)
    stored = SUPERVISED.products(recomputes=False) / 2 + once / 3 + 2.5 * once / 5
    assert SUPERVISED.bound(2, {"forward": 3, "backward": 5}) == pytest.approx(stored)


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["camshaft", "SDPA, flash"])
@pytest.mark.parametrize("case", gpu_attention.TINY, ids=str)
def test_a_kernel_is_compared_with_float64(case: Case, kernel: str) -> None:
    row = gpu_attention.measured(kernel, case, "cpu", torch.float32)
    assert 0 < row["error"] < 1e-5
    assert min(row["forward"], row["backward"]) > 0


def test_repeated_keys_give_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = partial(gpu_attention.repeated, gpu_attention.KERNELS["SDPA, flash"])
    monkeypatch.setitem(gpu_attention.KERNELS, "repeated", kernel)
    assert gpu_attention.measured("repeated", gpu_attention.TINY[1], "cpu", torch.float32)["error"] < 1e-5


def test_the_reference_of_kernels_equals_a_dense_computation() -> None:
    case = Case(4, 2, 8, (5, 1, 9))
    inputs = [tensor.detach().double() for tensor in case.inputs("cpu", torch.float32)]
    expected = dense_attention(*(tensor.transpose(0, 1) for tensor in inputs), lengths=case.lengths, parents=None)
    assert torch.allclose(gpu_attention.exact(*inputs, lengths=case.lengths), expected, rtol=1e-12)


def test_a_kernel_that_ignores_rows_has_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    one_row = Case(4, 2, 32, (64,))
    wrong = lambda case, device: gpu_attention.camshaft(one_row, device)  # noqa: E731
    monkeypatch.setitem(gpu_attention.KERNELS, "camshaft", wrong)
    assert gpu_attention.measured("camshaft", gpu_attention.TINY[1], "cpu", torch.float32)["error"] > 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without CUDA")
@pytest.mark.parametrize("kernel", ["SDPA, cuDNN", "cuDNN, variable length", "varlen_attn", "FA3", "camshaft with FA3"])
def test_a_kernel_that_is_missing_reports_the_reason(kernel: str) -> None:
    row = gpu_attention.measured(kernel, gpu_attention.TINY[0], "cpu", torch.float32)
    assert row["missing"]
    assert "forward" not in row


def test_every_kernel_is_in_a_group() -> None:
    assert sorted(kernel for group in gpu_rows.GROUPS for kernel in group) == sorted(gpu_attention.KERNELS)


# -- the script -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_writes_both_tables(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_rows.py"), "--tiny", "--device", "cpu", "--rounds", "1"]
    process = subprocess.run([*command, "--out", str(tmp_path / "rows")], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    result = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert len(result["updates"]) == len(gpu_rows.TINY)
    for row in result["updates"]:
        assert row["sides"]["camshaft"]["loss"] == pytest.approx(row["sides"]["textbook"]["loss"], rel=1e-4)
        assert row["share"] * row["bound"] == pytest.approx(row["sides"]["camshaft"]["tokens_per_second"])
        assert row["best_bound"] >= row["bound"]
    page = (tmp_path / "rows.md").read_text(encoding="utf-8")
    assert page.count("| camshaft |") == len(gpu_attention.TINY) + 1
    assert "FlexAttention does not support backward on CPU" in page


def test_a_side_that_fails_is_a_cell_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"failed": "out of memory"}, {"tokens_per_second": 5.0, "seconds": 1.0, "gib": 2.0, "loss": 0.1}])
    monkeypatch.setattr(gpu_rows, "in_process", lambda *_: next(answers))
    options: Any = type("Options", (), {"device": "cpu", "dtype": "float32", "rounds": 1, "profile": False})
    row = gpu_rows.update_row(FULL, options, [], matmul=1e9)
    assert (row["camshaft"], row["textbook"]) == ("out of memory", "5 tokens/s, 2.0 GiB")
    assert row["ratio"] is row["bound"] is None
