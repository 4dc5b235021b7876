"""The memory of a model with many layers follows from models with few layers."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.plan import run_arguments, write_inputs
from camshaft.config import PPOConfig, compose
from camshaft.planning import trace
from camshaft.planning.layers import Layers, Phase, Trace, choose_layers, extrapolate
from camshaft.planning.tensor_memory import Label, Part
from camshaft.planning.trace import CRITIC, POLICY

LAYERS = 11
WINDOW, FULL = "sliding_attention", "full_attention"


def test_equal_layers_are_traced_with_four_and_six() -> None:
    assert choose_layers(["full"] * 80) == Layers(80, (4, 6), first=2, last=2)
    assert choose_layers(["full"] * 7).traced == (4, 6)


def test_small_models_are_traced_in_full() -> None:
    assert choose_layers(["full"] * 6) == Layers(6, (6,))
    assert choose_layers(range(10)).traced == (10,)


def test_dense_layers_before_experts_are_all_traced() -> None:
    layers = choose_layers(["dense"] * 3 + ["experts"] * 58)
    assert layers == Layers(61, (7, 9), first=5, last=2)


def test_traces_end_with_the_kinds_of_the_last_layers() -> None:
    kinds = ([WINDOW] * 5 + [FULL]) * 10 + [WINDOW] * 2
    layers = choose_layers(kinds)
    fewest, most = layers.traced
    assert most - fewest == 6
    assert kinds[fewest - layers.last : fewest] == kinds[most - layers.last : most] == kinds[-layers.last :]


def phase(peak: int, parts: list[tuple[Label | None, int]], rest: int = 0, disk: int = 0) -> Trace:
    return Trace(Phase("actor", "update_actor", peak, rest, disk), [Part(label, size, 0) for label, size in parts])


def test_the_peak_moves_to_the_part_that_grows() -> None:
    # The embedding's gradient needs 100, and a layer 10 for its activations: 60 with 4 layers, 220 with 20.
    few = phase(100, [(("backward", 3), 60), (("backward", 0), 30), (None, 100)], rest=8, disk=40)
    more = phase(
        100, [(("backward", 5), 80), (("backward", 3), 60), (("backward", 0), 30), (None, 100)], rest=12, disk=60
    )
    (found,) = extrapolate(Layers(20, (4, 6), first=2, last=2), [[few], [more]])
    assert found == Phase("actor", "update_actor", peak=220, rest=40, disk=200)


# -- forecasts of few layers and of all ------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    write_inputs(folder, hidden=64, layers=LAYERS)
    return folder


def trace_in_full(config: PPOConfig, group: str) -> list[Phase]:
    (phases,) = trace.trace_layers(config, group, (LAYERS,))
    return [traced.phase for traced in phases]


CASES = [
    pytest.param("reference", 1, "cpu", CRITIC, False, marks=pytest.mark.slow),
    ("reference", 1, "cpu", POLICY, True),
    pytest.param("fsdp", 2, "cpu", POLICY, False, marks=pytest.mark.slow),
    pytest.param("fsdp", 2, "cuda", CRITIC, True, marks=pytest.mark.slow),
    pytest.param("fsdp", 8, "cpu", CRITIC, False, marks=pytest.mark.slow),
    pytest.param("fsdp", 8, "cuda", POLICY, True, marks=pytest.mark.slow),
    pytest.param("fsdp", 8, "cuda", POLICY, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "ranks", "device", "group", "checkpointing"), CASES)
def test_few_layers_tell_the_memory_of_all(
    folder: Path, process: ProcessPoolExecutor, strategy: str, ranks: int, device: str, group: str, checkpointing: bool
) -> None:
    model = {POLICY: "actor_rollout_ref.model", CRITIC: "critic.model"}[group]
    arguments = run_arguments(folder, strategy, ranks, batch=2 * ranks, length=32)
    arguments += [f"trainer.device={device}", f"{model}.enable_gradient_checkpointing={checkpointing}"]
    (config,) = compose(arguments, PPOConfig)
    full = process.submit(trace_in_full, config, group).result(timeout=300)
    few = process.submit(trace.forecast, config, group).result(timeout=300)
    assert [item[:2] for item in few] == [item[:2] for item in full]
    for forecast, exact in zip(few, full, strict=True):
        for field in ("peak", "rest", "disk", "host"):
            assert getattr(forecast, field) == pytest.approx(getattr(exact, field), rel=0.001), (exact, field)
