"""`camshaft plan` forecasts the memory of a run with the code of its engines."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import camshaft, rm_args, sft_args
from support.ranks import run_ranks
from torch._C._distributed_c10d import _get_work_registry_size

from benchmarks.plan import cases, overrides, run_arguments, write_inputs
from camshaft.cli.plan import parse_size
from camshaft.config import PPOConfig, RMConfig, SFTConfig, compose, rollout_engine
from camshaft.errors import ConfigError
from camshaft.planning import plan as plan_module
from camshaft.planning.generator import model_size
from camshaft.planning.plan import compose_run, find_change, make_plan, process_growth
from camshaft.planning.tensor_memory import TensorMemory
from camshaft.planning.trace import CRITIC, MODEL, Phase, forecast, measure
from camshaft.rollout.builtin.cpu.linears import MKLPacked, OneDNNPacked, is_layout_valid

QUICK = (("fsdp", 2, CRITIC, "checkpointing"),)
"""Cases of the default suite; `make test-slow` runs all."""
SIZES = {"batch": 4, "length": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_inputs(folder, hidden=64, layers=2)
    return folder


def arguments(folder: Path, *changes: str, strategy: str = "fsdp") -> list[str]:
    return [*run_arguments(folder, strategy, ranks=1, **SIZES), *changes]


def quick_or_slow() -> Iterator[Any]:
    for case in cases():
        yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("strategy", "ranks", "group", "feature"), list(quick_or_slow()))
def test_forecast_matches_real_ranks(
    folder: Path, process: ProcessPoolExecutor, strategy: str, ranks: int, group: str, feature: str
) -> None:
    (config,) = compose(overrides(folder, strategy, ranks, group, feature, **SIZES), PPOConfig)
    planned: list[Phase] = process.submit(forecast, config, group).result(timeout=60)
    differences: list[tuple[Phase, Phase]] = []
    for _ in range(2):  # on a busy machine, the thread of gloo may free the buffers of a collective late
        measured: list[Phase] = run_ranks(measure, ranks, config, group)[0]
        assert [phase[:2] for phase in planned] == [phase[:2] for phase in measured]
        pairs = zip(planned, measured, strict=True)
        differences = [(plan, real) for plan, real in pairs if not matches(plan, real)]
        if not differences:
            break
    assert not differences
    unwaited = process.submit(_get_work_registry_size).result(timeout=60)
    assert unwaited == 0, "torch warns of collectives without a wait when the process ends"


def matches(plan: Phase, real: Phase) -> bool:
    return (plan.peak, plan.rest) == pytest.approx((real.peak, real.rest), rel=0.01)


def test_the_exit_status_and_the_change_answer_if_it_fits(folder: Path) -> None:
    changes = ("data.max_response_length=64", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf")
    overrides = arguments(folder, *changes, "actor_rollout_ref.actor.use_kl_loss=false", strategy="reference")
    plan = camshaft("plan", "--json", *overrides)
    content = json.loads(plan.out)
    assert (plan.status, content["fits"]) == (0, True)
    limit = content["tightest"]["peak"] * 9 // 10
    small = camshaft("plan", "--memory", str(limit), *overrides)
    assert small.status == 3
    assert "does not fit" in small.out
    change = small.out.rpartition("it fits with ")[2].partition(":")[0].split()
    assert change
    assert camshaft("plan", "--memory", str(limit), *overrides, *change).status == 0


def test_prompts_of_the_data_are_planned_unless_their_length_is_set(folder: Path, tmp_path: Path) -> None:
    words = [word for word in arguments(folder, strategy="reference") if "max_prompt_length" not in word]
    measured = compose_run(words, PPOConfig)
    assert isinstance(measured, PPOConfig)
    assert measured.data.max_prompt_length == len("1+2=")
    notes = make_plan(measured, None).notes
    (tmp_path / "empty.jsonl").write_text("")
    assumed = compose_run([*words, f"data={tmp_path}/empty.jsonl"], PPOConfig)
    assert isinstance(assumed, PPOConfig)
    note = f"prompts of {assumed.data.max_prompt_length} tokens are assumed"
    assert assumed.data.max_prompt_length > 100
    assert [note in text for text in (str(notes), str(make_plan(assumed, None).notes))] == [False, True]


@pytest.mark.slow
def test_episodes_keep_rows(folder: Path) -> None:
    words = arguments(folder, "actor_rollout_ref.rollout.ignore_eos=false", strategy="reference")
    (single,) = compose(words, PPOConfig)
    (config,) = compose([*words, "actor_rollout_ref.rollout.multi_turn.environment=my_package:Game"], PPOConfig)
    peaks = [next(row.peak for row in make_plan(each, None).rows if row.phase == "gen") for each in (single, config)]
    rollout = config.actor_rollout_ref.rollout
    length = config.data.max_prompt_length + config.data.max_response_length
    row = sum(model_size(rollout_engine(config)).position) * length
    assert peaks[1] - peaks[0] == pytest.approx(config.data.train_batch_size * rollout.n * row, rel=0.2)


def test_unsupported_engines_are_rejected(folder: Path) -> None:
    run = camshaft("plan", *arguments(folder, strategy="fsdp1"))
    assert run.status == 2
    assert "does not forecast the engine 'fsdp1'" in run.err


def test_nothing_is_computed_and_freed_tensors_do_not_count() -> None:
    with TensorMemory(computes=False) as memory:
        weight = torch.randn(1000, 1000, requires_grad=True)
        (weight @ weight).sum().backward()
        del weight
    assert memory.live == 0
    assert memory.peak >= 3 * 4_000_000


@pytest.mark.parametrize("layout", [OneDNNPacked, MKLPacked])
def test_packed_weights_count(layout: Any) -> None:
    if not is_layout_valid(layout, 100, 70):
        pytest.skip(f"requires torch with the layout of {layout.__name__}")
    weight, rows, sizes = torch.randn(100, 70), torch.randn(40, 70), []
    for computes in (True, False):
        with TensorMemory(computes) as memory:
            packed = layout(weight, None)
            sizes.append(memory.live)
            assert packed.product(40)(rows).shape == (40, 100)
            del packed
            assert memory.live == 0
    assert sizes[0] == sizes[1] >= weight.nbytes


def test_experts_in_float32_count() -> None:
    live = []
    for computes in (True, False):
        with TensorMemory(computes) as memory:
            rows = torch.randn(512, 64, requires_grad=True)
            experts = torch.randn(4, 64, 128, requires_grad=True)
            offsets = torch.tensor([100, 200, 300, 512], dtype=torch.int32)
            out = torch.nn.functional.grouped_mm(rows, experts, offs=offsets)
            gradients = torch.autograd.grad(out.square().sum(), (rows, experts))
            shapes = [tensor.shape for tensor in (out, *gradients)]
            assert shapes == [(512, 128), rows.shape, experts.shape]
            live.append(memory.live)
    assert live[0] == live[1]


def test_the_norm_of_gradients_that_are_not_computed_is_finite() -> None:
    gradients = [torch.full((size,), math.nan) for size in (8, 2000)]
    with TensorMemory(computes=False):
        for gradient in gradients:
            assert math.isfinite(torch.nn.utils.get_total_norm([gradient]))
            assert math.isfinite(torch.nn.utils.get_total_norm([gradient], foreach=True))


def test_a_process_that_trains_an_adapter_grows_by_the_modules_of_peft(folder: Path) -> None:
    (plain,) = compose(overrides(folder, "fsdp", 1, CRITIC, "plain", **SIZES), PPOConfig)
    (lora,) = compose(overrides(folder, "fsdp", 1, CRITIC, "lora", **SIZES), PPOConfig)
    code = (
        "import os, camshaft.models.loader, camshaft.planning.trace\n"
        "from camshaft.subprocesses import resident_memory\n"
        "before = resident_memory(os.getpid(), 'RssAnon')\n"
        "import peft\n"
        "print(resident_memory(os.getpid(), 'RssAnon') - before)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    growth = process_growth(lora, CRITIC) - process_growth(plain, CRITIC)
    assert int(run.stdout) == pytest.approx(growth, rel=0.6)


def test_sizes_need_a_known_unit() -> None:
    assert parse_size("80GiB") == 80 * 2**30
    for text in ("80 bananas", "1.2.3GiB", "."):
        with pytest.raises(ConfigError, match="not a size"):
            parse_size(text)


def test_a_misspelt_key_to_solve_is_an_error(folder: Path) -> None:
    result = camshaft("plan", "--solve", "trainer.total_epoch", *arguments(folder, strategy="reference"))
    assert result.status == 2
    assert "trainer.total_epochs" in result.err


@pytest.mark.slow
def test_the_solved_value_fits_and_its_double_does_not(folder: Path) -> None:
    changes = ("data.max_response_length=64", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf")
    batch = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    overrides = arguments(folder, *changes, *batch, "actor_rollout_ref.actor.use_kl_loss=false", strategy="reference")
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    limit = json.loads(camshaft("plan", "--json", *overrides, f"{key}=8").out)["tightest"]["peak"]
    solved = camshaft("plan", "--memory", str(limit), "--solve", key, *overrides)
    value = int(solved.out.partition("=")[2].partition(" ")[0])
    as_json = camshaft("plan", "--memory", str(limit), "--solve", key, "--json", *overrides)
    assert json.loads(as_json.out) == {"key": key, "value": value}
    assert value >= 8
    assert camshaft("plan", "--memory", str(limit), *overrides, f"{key}={value}").status == 0
    assert camshaft("plan", "--memory", str(limit), "--json", *overrides, f"{key}={2 * value}").status == 3


@pytest.mark.slow
def test_json_of_an_unsolvable_key_has_no_value(folder: Path) -> None:
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    overrides = arguments(folder, strategy="reference")
    solved = camshaft("plan", "--memory", "1MiB", "--solve", key, "--json", *overrides)
    assert (solved.status, json.loads(solved.out)) == (3, {"key": key, "value": None})


MICRO_BATCHES_OF_ONE = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "critic.forward_micro_batch_size_per_gpu=1",
)
LONG_ROWS = ("data.max_response_length=256", "actor_rollout_ref.rollout.name=hf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "changes", "key"),
    [
        ("reference", 1, ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",), "ppo_micro_batch_size_per_gpu"),
        ("reference", 1, MICRO_BATCHES_OF_ONE, "enable_gradient_checkpointing"),
        (
            "fsdp",
            2,
            (
                *MICRO_BATCHES_OF_ONE,
                "actor_rollout_ref.model.enable_gradient_checkpointing=true",
                "critic.model.enable_gradient_checkpointing=true",
            ),
            "ulysses_sequence_parallel_size",
        ),
    ],
)
def test_a_run_that_does_not_fit_fits_with_the_change(
    folder: Path, process: ProcessPoolExecutor, strategy: str, ranks: int, changes: tuple[str, ...], key: str
) -> None:
    arguments = [*run_arguments(folder, strategy, ranks, **SIZES), *LONG_ROWS, *changes]
    process.submit(check_change, arguments, ranks, key).result(timeout=120)


def test_the_search_ends_early_if_all_changes_together_do_not_suffice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []
    real = plan_module._try_plan
    monkeypatch.setattr(plan_module, "_try_plan", lambda run, *rest: tried.append(list(run)) or real(run, *rest))
    changes = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "critic.ppo_micro_batch_size_per_gpu=4"]
    assert find_change(arguments(folder, *changes, strategy="reference"), 1 << 20) is None
    (strongest,) = tried
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1" in strongest
    assert "actor_rollout_ref.model.enable_gradient_checkpointing=true" in strongest
    assert "critic.ppo_micro_batch_size_per_gpu=1" in strongest


def check_change(arguments: list[str], ranks: int, key: str) -> None:
    """Check that a change of `key` makes a run fit whose memory is 3 % too small. Runs in a process of its own."""
    (config,) = compose(arguments, PPOConfig)
    memory = make_plan(config, None).tightest.peak * ranks * 97 // 100
    assert not make_plan(config, memory).fits
    change = find_change(arguments, memory)
    assert change is not None
    assert any(key in override for override in change[0]), change[0]
    (changed,) = compose([*arguments, *change[0]], PPOConfig)
    assert make_plan(changed, memory).fits


@pytest.mark.parametrize("schema", [SFTConfig, RMConfig])
def test_forecast_of_a_supervised_run_matches_it(
    schema: type[SFTConfig] | type[RMConfig], process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    args = sft_args if schema is SFTConfig else rm_args
    held_out = tmp_path / "data" / ("sft_heldout.parquet" if schema is SFTConfig else "preference_heldout.parquet")
    config = compose_run(args(tmp_path, {"data.val_files": held_out}), schema)
    planned: list[Phase] = process.submit(forecast, config, MODEL).result(timeout=60)
    measured: list[Phase] = run_ranks(measure, 1, config, MODEL)[0]
    assert [phase.name for phase in planned] == ["build", "train", "validate", "save"]
    for plan, real in zip(planned[1:], measured[1:], strict=True):  # `reference` loads its weights by another path
        assert plan[:2] == real[:2]
        assert matches(plan, real), (plan, real)


def test_the_plan_of_a_supervised_run_names_a_change(tmp_path: Path) -> None:
    overrides = ["--trainer", "sft", *sft_args(tmp_path, {"data.max_length": 256})]
    plan = json.loads(camshaft("plan", "--json", *overrides).out)
    assert (plan["fits"], plan["tightest"]["phase"]) == (True, "train")
    small = camshaft("plan", "--memory", str(plan["tightest"]["peak"] * 9 // 10), *overrides)
    assert small.status == 3
    assert "it fits with data.micro_batch_size_per_gpu=2:" in small.out
