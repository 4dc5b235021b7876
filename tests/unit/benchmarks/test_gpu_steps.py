"""`benchmarks/gpu_steps.py` without a GPU: bounds of the phases, long tails, and the page."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import camshaft_side
import gpu_steps
from gpu_model import SIZES
from roofline import Rates
from support.processes import forked_process

BENCHMARKS = Path(gpu_steps.__file__).parent
TINY = {"model": "tiny", "prompts": 2, "prompt": 8, "median": 4, "longest": 6, "budget": 256, "steps": 1}
TINY |= {"device": "cpu", "dtype": "float32"}


def test_bounds_of_the_phases_by_hand() -> None:
    shape, prompt, length = SIZES["tiny"].shape, 10, 3
    seconds = gpu_steps.seconds_at(Rates(1, 2.0, 5.0), "tiny", prompt, [length] * 16, "bfloat16")
    weights, head = shape.weights_of_layers(), shape.hidden * shape.vocab_size
    prefill = 2 * (2 * weights * prompt + 2 * head + 4 * shape.layers * shape.hidden * prompt * (prompt + 1) / 2)
    position = 2 * shape.layers * shape.hidden * shape.kv_heads // shape.heads
    # A decode step reads the weights, for two groups a prompt, and the earlier tokens of 16 rows, and writes 16 tokens.
    steps = [weights + head + position * (2 * prompt + 16 * (step - 1) + 16) for step in (1, 2)]
    assert seconds["gen"] == pytest.approx(prefill / 2 + 2 * sum(steps) / 5)
    assert seconds["update_actor"] == pytest.approx(3 * seconds["old_log_prob"])


@pytest.mark.parametrize(("response", "most"), [("4", 4), ("tails", 6)])
def test_responses_have_the_given_lengths(response: str, most: int) -> None:
    with forked_process() as executor:
        result = executor.submit(gpu_steps.run_task, TINY | {"response": response}).result(timeout=300)
    lengths = result["lengths"]
    assert len(lengths) == 2 * gpu_steps.SAMPLES
    assert max(lengths) == most
    assert (min(lengths) == most) == (response == "4")
    row = gpu_steps.result_row(TINY | {"response": response}, result, {"measured": Rates(1, 1e12, 1e12)})
    assert row["tokens_per_second"] * row["step"] == pytest.approx(sum(lengths))
    assert all(0 < row[f"{phase}_measured"] < 1 for phase in gpu_steps.PHASES)


def test_the_settings_are_valid_on_a_gpu(tmp_path: Path) -> None:
    gpu_steps.write_inputs(tmp_path, "1.5B", prompts=2, length=1024, longest=9216)
    task = {"device": "cuda", "dtype": "bfloat16", "prompts": 64, "budget": 16_384}
    actual = camshaft_side.config(tmp_path, **gpu_steps.settings(task, 1024, 8192))
    assert actual.actor_rollout_ref.actor.fsdp_config.compute_dtype() == "bfloat16"
    assert actual.actor_mini_batch() == 32 * gpu_steps.SAMPLES
    assert not actual.actor_rollout_ref.rollout.enforce_eager


@pytest.mark.slow
def test_the_script_reports_each_kind_of_responses(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_steps.py"), "--tiny", "--device", "cpu", "--steps", "1"]
    process = subprocess.run([*command, "--out", str(tmp_path / "steps")], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    rows: list[Any] = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))["rows"]
    assert [row["response"] for row in rows] == ["8", "tails"]
    assert (tmp_path / "steps.md").read_text(encoding="utf-8").count("| tails |") == 1
