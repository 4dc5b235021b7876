"""The metrics of tiny runs are bit-identical to stored ones, so a refactor cannot change numbers unnoticed.

    python tests/golden/test_golden.py       # rewrite the files; the commit explains the change

Floating-point sums depend on the vector units of the processor, so each file names the processor that wrote it. The
comparison is exact on that processor; elsewhere it allows rounding differences.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.ppo_runs import run_ppo

from camshaft.tracking import deterministic

HERE = Path(__file__).parent
RUNS: dict[str, dict[str, Any]] = {
    "ppo_tiny": {"algorithm.use_kl_in_reward": True, "actor_rollout_ref.rollout.n": 2},
    "grpo_tiny": {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64,
    },
}
STEPS = 5


def processor() -> str:
    """Describe the environment on which rounding depends: processor, vector units and torch version.

    The name alone does not identify a processor, because virtual machines shorten it.
    """
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(re.findall(r"^(.*\S)\s*: (.*)$", info.split("\n\n")[0], re.MULTILINE))
    model = "/".join(fields.get(name, "?") for name in ("model name", "cpu family", "model", "stepping"))
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def metrics_of(name: str, folder: Path) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    return [deterministic(step.metrics) for step in run_ppo(folder, RUNS[name], STEPS)]


def written(name: str) -> tuple[str, list[dict[str, float]]]:
    head, *lines = (HERE / f"{name}.jsonl").read_text().splitlines()
    return json.loads(head)["processor"], [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    """Return the metrics of a run, which is made once."""
    return cache(lambda name: metrics_of(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", RUNS)
def test_run_reproduces_its_golden_metrics(name: str, runs: Callable[[str], list[dict[str, float]]]) -> None:
    where, golden = written(name)
    steps = runs(name)
    assert len(steps) == len(golden) == STEPS
    exact = where == processor()
    for step, (actual, reference) in enumerate(zip(steps, golden, strict=True), start=1):
        assert actual.keys() == reference.keys(), f"step {step}: metrics {sorted(actual.keys() ^ reference.keys())}"
        for key, value in reference.items():
            expected = value if exact else pytest.approx(value, rel=1e-3, abs=1e-4)
            assert actual[key] == expected, f"step {step}: {key}"


@pytest.mark.slow
def test_two_equal_runs_are_bitwise_equal(runs: Callable[[str], list[dict[str, float]]], tmp_path: Path) -> None:
    assert metrics_of("ppo_tiny", tmp_path) == runs("ppo_tiny")


if __name__ == "__main__":
    for run in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            lines = metrics_of(run, Path(scratch))
        body = "\n".join(json.dumps(line) for line in [{"processor": processor()}, *lines])
        (HERE / f"{run}.jsonl").write_text(body + "\n")
