"""The statistics of the paired benchmarks, and the detection of a side that computes something else."""

import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import paired
import workload


def spent(cpu: float, **numbers: float) -> dict[str, Any]:
    return {"wall": cpu, "cpu": cpu, "memory": 10.0, "result": numbers}


def test_a_ratio_is_the_median_over_rounds() -> None:
    rounds = [{"a": spent(1.0), "b": spent(2.0)}, {"a": spent(10.0), "b": spent(30.0)}, {"a": spent(1), "b": spent(9)}]
    assert paired.ratio(rounds, "b", "a", "cpu") == 3.0
    assert paired.middle(rounds, "a", "cpu") == 1.0


def test_sides_with_different_losses_are_an_error() -> None:
    paired.agree({"a": spent(1, loss=0.5, more=1), "b": spent(1, loss=0.5001, more=2), "silent": spent(1)}, ["loss"])
    with pytest.raises(SystemExit, match=r"computed different things, loss: \{'a': 0.5, 'b': 0.51\}"):
        paired.agree({"a": spent(1, loss=0.5), "b": spent(1, loss=0.51)}, ["loss"])


def test_ratio_below_the_margin_is_reported() -> None:
    from check import CASES, committed, slower

    assert slower("steps", {"careful": 2.0}, {"careful": 1.87, "new": 1.2}) == []
    assert slower("steps", {"careful": 2.0}, {"careful": 1.85}) == [
        "steps: careful takes 1.85 times as long as camshaft; committed: 2.00"
    ]
    for ratios in committed().values():
        assert ratios.keys() <= CASES.keys()
        assert all(ratio > 1 for sides in ratios.values() for ratio in sides.values())


@pytest.mark.parametrize(
    ("kind", "reference"), [("AMD AVX2", "AMD AVX2"), ("AMD AVX512", "AMD AVX2"), ("Intel AVX2", "Intel AVX512")]
)
def test_ratios_of_the_nearest_processor_are_used(kind: str, reference: str) -> None:
    from check import nearest

    assert nearest(kind, ["Intel AVX512", "AMD AVX2"]) == reference


def test_unknown_vendor_has_no_ratios(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import check

    monkeypatch.setattr(check.machine, "kind", lambda: "ARM DEFAULT")
    assert check.main([]) == 0
    assert "no committed ratios for ARM DEFAULT" in capsys.readouterr().out


@pytest.mark.parametrize(("second", "status"), [(1.9, 0), (1.6, 1)])
def test_fallen_ratio_is_measured_twice(
    second: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import check

    measured = []

    def compared(model: str, sides: list[str], threads: int, rounds: int) -> list[dict[str, Any]]:
        measured.append(rounds)
        ratio = 1.6 if rounds == 5 else second
        return [{"side": "camshaft", "wall_ratio": 1.0}, {"side": "careful", "wall_ratio": ratio}]

    monkeypatch.setattr(check, "CASES", {"steps": (compared, ["careful"])})
    monkeypatch.setattr(check, "committed", lambda: {check.machine.kind(): {"steps": {"careful": 2.0}}})
    assert check.main([]) == status
    assert measured == [5, 10]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "steps: careful takes 1.60 times as long as camshaft; committed: 2.00"
        if status
        else "no ratio fell by more than 7%"
    )


def test_a_missing_number_is_an_empty_cell() -> None:
    columns = {"side": "{side}", "both": "{a:.1f}, {b:.0%}"}
    rows = [{"side": "one", "a": 1.25, "b": 0.5}, {"side": "two", "a": None, "b": 0.5}]
    assert paired.table(rows, columns).splitlines()[2:] == ["| one | 1.2, 50% |", "| two |  |"]
    with pytest.raises(KeyError, match="b"):
        paired.table([{"side": "three", "a": 1.0}], columns)


def test_rows_follow_seeds_and_average_half_the_longest() -> None:
    rows, again = workload.training_rows(512, seed=3), workload.training_rows(512, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(rows.responses, again.responses, strict=True))
    assert len(rows) == workload.PROMPTS * workload.SAMPLES
    assert torch.equal(rows.prompts[0], rows.prompts[7])
    lengths = [len(r) for seed in range(20) for r in workload.training_rows(512, seed).responses]
    assert sum(lengths) / len(lengths) == pytest.approx(workload.LONGEST_RESPONSE / 2, rel=0.05)


def test_the_peak_covers_memory_after_the_reset() -> None:
    before = paired.forget_peak()
    if not before:
        pytest.skip("this system does not report peak memory")
    with mmap.mmap(-1, 32 << 20) as block:  # separate pages, because an allocator may reuse freed ones
        block.write(bytes([1]) * len(block))
        assert paired.peak() - before >= 32 << 20


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_sides_compute_one_loss(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train_step import build, with_score

    from camshaft.models.tiny import make_tiny_model

    make_tiny_model(tmp_path, hidden=32)
    (tmp_path / "train.parquet").touch()
    if role == "critic":
        with_score(tmp_path)
    monkeypatch.setitem(workload.SHAPES, "tiny", workload.Shape(32, 2, 4, 2, 64, 112))
    case = {"folder": str(tmp_path), "model": "tiny", "role": role}
    first, *others = (build(name, case)(5) for name in ("camshaft", "careful", "transformers"))
    assert first["grad_norm"] > 0.01
    assert all(other == pytest.approx(first, rel=1e-3) for other in others)
