"""`camshaft plan --trainer serve` forecasts the memory of the worker of a server."""

import json
from pathlib import Path

import pytest
import torch
from support.command_line import camshaft

from camshaft.algorithms.token_losses import LOSSES
from camshaft.config.engine import LoRAConfig
from camshaft.config.serve import ServeConfig, read_serve_config
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import StepHyperparameters
from camshaft.models.tiny import make_tiny_model
from camshaft.planning.generator import model_size
from camshaft.planning.plan import Plan
from camshaft.planning.served import plan_service
from camshaft.planning.tensor_memory import TensorMemory
from camshaft.reshard.snapshot import SEGMENT
from camshaft.roles.served import ServedWorker
from camshaft.rollout import SamplingParams

LENGTH, TOKENS, SAMPLES = 64, 256, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("served")
    for name, hidden, layers in (("small", 64, 2), ("large", 128, 3)):
        make_tiny_model(folder / name, hidden=hidden, layers=layers, seed=0)
    return {name: str(folder / name) for name in ("small", "large")}


def read(*arguments: str) -> ServeConfig:
    return read_serve_config(
        ["device=cpu", f"max_model_len={LENGTH}", f"max_tokens={TOKENS}", "max_data=8", *arguments]
    )


def peak(plan: Plan, phase: str) -> int:
    (row,) = (row for row in plan.rows if row.phase == phase)
    return row.peak


def measure(config: ServeConfig, base: str, rank: int, tmp_path: Path) -> tuple[int, int]:
    """Train two models in a worker, and return the peaks of an update of the first one and of sampling."""
    rows, targets = 8, torch.randint(64, (8 * LENGTH,))
    tokens = Ragged(targets, torch.full((rows,), LENGTH))
    columns = {
        "input_ids": tokens, "targets": tokens, "loss_mask": tokens.like(tokens.positions() > 0),
        "logprobs": tokens.like(torch.zeros(len(targets))), "advantages": tokens.like(torch.ones(len(targets))),
    }  # fmt: skip
    batch = DataProto.from_dict(columns, {"numbers": list(range(rows))})
    step = StepHyperparameters(lr=1e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, clip_grad=0.0)
    lora = LoRAConfig(rank=rank, alpha=32.0) if rank else None
    worker = ServedWorker(config.model_copy(update={"folder": str(tmp_path)}))
    with TensorMemory() as memory:
        for name in ("first", "second"):
            worker.create(name, base, lora, 0)

        def update(name: str) -> None:
            for _ in range(2):
                worker.forward_backward(name, batch, "ppo", LOSSES["ppo"].check_options({}), False)
            worker.optimizer_step(name, step)

        for name in ("first", "second"):
            update(name)
        worker.publish("first", "v1")
        prompts = Ragged.from_rows([torch.arange(LENGTH // 2) + i for i in range(SAMPLES)])
        for _ in range(2):  # the first call also compares layouts of packed weights
            memory.reset_peak()
            sampling = SamplingParams(LENGTH // 2, ignore_eos=True)
            worker.sample(base, "v1", prompts, sampling, torch.arange(SAMPLES))
        sampled = memory.peak - SEGMENT
        memory.reset_peak()
        update("first")
        return memory.peak - SEGMENT, sampled


@pytest.mark.parametrize("rank", [0, 8])
def test_the_forecast_matches_the_tensors_of_a_worker(models: dict[str, str], rank: int, tmp_path: Path) -> None:
    """The memory of published versions is a file whose size is measured, and not what has been written to it."""
    config = read(f"model={models['small']}", "max_versions=1")
    plan = plan_service(config, None, rank, SAMPLES)
    trained, sampled = measure(config, models["small"], rank, tmp_path)
    weights = model_size(config.rollout_config(models["small"], "cpu")).weights
    assert peak(plan, "train") - weights == pytest.approx(trained, rel=0.02)
    assert peak(plan, "gen") - weights == pytest.approx(sampled, rel=0.02)


def test_models_versions_and_the_largest_base_count(models: dict[str, str]) -> None:
    both = f"model=[{models['small']},teacher={models['large']}]"
    one, two = (plan_service(read(both, f"max_models={count}"), None, 8, SAMPLES) for count in (1, 2))
    rest = plan_service(read(f"model={models['large']}", "max_models=1"), None, 8, SAMPLES)
    small, weights = (model_size(read(both).rollout_config(models[name], "cpu")).weights for name in ("small", "large"))
    assert peak(one, "train") == peak(rest, "train") + small
    assert peak(two, "train") - peak(one, "train") > weights
    more = plan_service(read(both, "max_models=1", "max_versions=10"), None, 8, SAMPLES)
    assert any("need up to" in note and "(max_published=20)" in note for note in more.notes)
    assert peak(more, "train") - peak(one, "train") == 2 * weights


def test_ranks_that_only_sample_have_the_rollouts_alone(models: dict[str, str]) -> None:
    """Both phases together have one byte for each of the shared ranks, but the machine is divided by more ranks."""
    model = f"model={models['small']}"
    shared, separate = (plan_service(read(model, f"sampling_ranks={n}"), 2**30, 8, SAMPLES) for n in (0, 1))
    weights = model_size(read(model).rollout_config(models["small"], "cpu")).weights
    assert separate.memory == shared.memory // 2 == 2**29
    assert {row.phase: row.pool for row in separate.rows}["gen"] == "sampler"
    assert peak(shared, "train") - peak(separate, "train") >= weights
    trained = peak(shared, "gen") - peak(separate, "gen")  # two models and eight versions
    assert trained > 2 * weights + 8 * weights


def test_devices_hold_the_weights_of_rollouts(models: dict[str, str]) -> None:
    both = f"model=[{models['small']},{models['large']}]"
    one, two = (
        plan_service(read(both, "device=cuda", f"max_samplers={count}", "max_models=1"), 2**34, 0, SAMPLES)
        for count in (1, 2)
    )
    weights = model_size(read(both).rollout_config(models["small"], "cuda")).weights
    assert peak(two, "train") - peak(one, "train") == weights


def test_the_command_answers_if_a_server_fits(models: dict[str, str]) -> None:
    arguments = ("--trainer", "serve", "--lora-rank", "0", f"model={models['small']}", "device=cpu", "max_model_len=64")
    plan = camshaft("plan", "--json", *arguments)
    content = json.loads(plan.out)
    assert (plan.status, content["fits"]) == (0, True)
    small = camshaft("plan", "--memory", str(content["tightest"]["peak"] - 1), *arguments)
    assert small.status == 3
    assert "does not fit" in small.out
    assert "max_models" in small.out
    assert "all weights (--lora-rank 0)" in small.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trainer", "serve", "--solve", "max_tokens"), "--solve does not plan camshaft serve"),
        (("--trainer", "serve", "--samples", "0"), "--samples 0: they are at least 0 and 1"),
        (("--lora-rank", "8"), "set --trainer serve"),
    ],
)
def test_options_without_a_meaning_are_rejected(models: dict[str, str], options: tuple[str, ...], message: str) -> None:
    out = camshaft("plan", *options, f"model={models['small']}")
    assert out.status == 2
    assert message in out.err
