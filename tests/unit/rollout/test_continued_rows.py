"""Rows that are interrupted and continued with `generated`; the oracle is the uninterrupted row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from camshaft.cli import main
from camshaft.config.backends import can_score, used_capabilities
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import BaseRollout, Generation, RolloutCapabilities, SamplingParams, rollout_class
from camshaft.rollout.sampling import restart_seeds, row_seeds

LENGTH, CUT, ROWS = 20, 7, 45


@pytest.fixture(scope="module", params=["torch", "hf"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    return RolloutHarness(rollout_class(request.param), tmp_path_factory.mktemp("models"))


def options(case: Case, prompts: Ragged, seeds: Tensor) -> dict[str, dict[str, Any]]:
    """Return sampling options. Each stop string consists of the seventh and eighth token of a row."""
    free = case.rollout.generate_sequences(prompts, SamplingParams(LENGTH, ignore_eos=True), seeds).responses
    strings = tuple({case.text(row.tolist()[CUT - 1 : CUT + 1]) for row in free.rows()})
    return {
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 1.0, "top_p": 0.9},
        "stop": {"stop": strings},
    }


@pytest.mark.parametrize("option", ["presence", "frequency", "stop"])
def test_a_continued_row_has_the_tokens_of_an_uninterrupted_one(option: str, harness: RolloutHarness) -> None:
    case, prompts, seeds = harness.case(max_num_seqs=64), harness.prompts(*[4, 9, 2] * 15), torch.arange(ROWS)
    sampling = SamplingParams(LENGTH, ignore_eos=True, **options(case, prompts, seeds)[option])
    full = case.rollout.generate_sequences(prompts, sampling, seeds)
    start = full.responses.prefix(full.responses.lengths.clamp(max=CUT))
    rest = case.rollout.generate_sequences(prompts, sampling, seeds, generated=start)
    assert [row.tolist() for row in Ragged.join(start, rest.responses).rows()] == rows(full)
    assert torch.equal(rest.finished, full.finished)
    # Tokens that are appended to the prompt are not counted, so most rows differ.
    lost = case.rollout.generate_sequences(Ragged.join(prompts, start), sampling, seeds)
    assert sum(new != old for new, old in zip(rows(lost), rows(rest), strict=True)) > 0.8 * ROWS


def rows(generation: Generation) -> list[list[int]]:
    return [row.tolist() for row in generation.responses.rows()]


def test_ended_rows_stay_in_their_place(harness: RolloutHarness) -> None:
    case, prompts = harness.case(), harness.prompts(4, 9, 2, 6, 5)
    sampling = SamplingParams(6, temperature=0, ignore_eos=True)
    full = case.rollout.generate_sequences(prompts, sampling)
    generated = full.responses.prefix(torch.tensor([6, 2, 6, 0, 5]))
    out = case.rollout.generate_sequences(prompts, sampling, generated=generated)
    assert out.responses.lengths.tolist() == out.log_probs.lengths.tolist() == [0, 4, 0, 6, 1]
    assert torch.equal(Ragged.join(generated, out.responses).values, full.responses.values)
    ended = case.rollout.generate_sequences(prompts, sampling, generated=full.responses)
    assert ended.responses.lengths.tolist() == [0] * 5
    assert not ended.finished.any()


def test_a_row_without_earlier_tokens_is_a_new_row(harness: RolloutHarness) -> None:
    case, prompts, seeds = harness.case(), harness.prompts(4, 9), torch.arange(2)
    sampling = SamplingParams(8, presence_penalty=1.0)
    new = case.rollout.generate_sequences(prompts, sampling, seeds, generated=Ragged.from_rows([[], []]))
    assert rows(new) == rows(case.rollout.generate_sequences(prompts, sampling, seeds))


# -- validation and seeds -------------------------------------------------------------------------


class Restarting(BaseRollout):
    """A rollout that declares nothing and returns the open rows instead of a generation."""

    def load_weights(self, weights: Any) -> None: ...

    def weight_digests(self) -> dict[str, int]:
        return {}

    def generate_sequences(self, prompts: Any, sampling: Any, seeds: Any = None, generated: Any = None) -> Any:
        return self.open_rows(prompts, sampling, seeds, generated, 50, lambda tokens: 9 in tokens)

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


class Continuing(Restarting):
    capabilities = RolloutCapabilities(continues_rows=True)


PROMPTS, SEEDS = Ragged.from_rows([[1] * 3, [1] * 3, [1] * 6, [1] * 3]), torch.arange(4)
GENERATED = Ragged.from_rows([[5, 6], [], [7], [8, 9]], torch.int64)


def open_rows(cls: type[BaseRollout], generated: Ragged = GENERATED, **options: Any) -> Any:
    rollout = cls(RolloutEngineConfig(model_path="nowhere", max_model_len=8))
    return rollout.generate_sequences(PROMPTS, SamplingParams(4, **options), SEEDS, generated)


@pytest.mark.parametrize("cls", [Restarting, Continuing])
def test_limits_count_earlier_tokens(cls: type[BaseRollout]) -> None:
    open_ = open_rows(cls)
    assert open_.is_open.tolist() == [True, True, True, False]
    assert open_.finished.tolist() == [False, False, False, True]
    assert open_.limits.tolist() == [2, 4, 1]
    assert [row.tolist() for row in open_.contexts.rows()] == [[1, 1, 1, 5, 6], [1] * 3, [1] * 6 + [7]]


def test_only_rollouts_that_do_not_continue_rows_get_other_seeds() -> None:
    assert open_rows(Continuing).seeds.tolist() == [0, 1, 2]
    first, second, third = open_rows(Restarting).seeds.tolist()
    assert second == 1
    assert len({first, third, *range(4)}) == 6


def test_seeds_after_different_numbers_of_tokens_differ() -> None:
    seeds, counts = row_seeds(3, 1, 300)[:, None], torch.arange(40)
    assert len(restart_seeds(seeds, counts).unique()) == 300 * 40
    assert torch.equal(restart_seeds(seeds, counts)[:, 0], seeds[:, 0])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"presence_penalty": 0.5}, "Restarting cannot continue rows with presence_penalty=0.5, because"),
        ({"frequency_penalty": -0.5}, "rows with frequency_penalty=-0.5, .*; remove frequency_penalty, or use"),
        ({"stop": ("###",)}, r"rows with stop=\('###',\), because it applies stop to the tokens of one call"),
    ],
)
def test_options_that_a_restart_would_break_are_rejected(option: dict[str, Any], message: str) -> None:
    cls = type("Restarting", (Restarting,), {"capabilities": RolloutCapabilities(sampling=frozenset(option))})
    with pytest.raises(RolloutError, match=message):
        open_rows(cls, **option)
    open_rows(cls, Ragged.from_rows([[]] * 4), **option)  # new rows


@pytest.mark.parametrize(
    ("generated", "message"),
    [
        ([[5], [6]], "generated has 2 rows for 4 prompts; pass one row per prompt, without tokens"),
        ([[5], [], [6, 50], []], "row 2 has token id 50, but .* 0..49; pass the tokens that this rollout"),
    ],
)
def test_wrong_earlier_tokens_are_named(generated: list[list[int]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        open_rows(Continuing, Ragged.from_rows(generated, torch.int64))


# -- capabilities ---------------------------------------------------------------------------------


def continues_rows(name: str, **engine_kwargs: str) -> bool:
    return used_capabilities(name, engine_kwargs).continues_rows


def test_a_process_continues_rows_like_the_rollout_inside() -> None:
    assert [continues_rows("process", rollout=name) for name in ("torch", "hf", "vllm")] == [True, True, False]
    assert continues_rows("process")
    assert not continues_rows("server")
    assert not continues_rows(f"{__name__}:{Restarting.__name__}")


def test_a_process_scores_like_the_rollout_inside() -> None:
    inside = ("torch", "hf", "vllm", "server")
    assert [can_score("process", {"rollout": name}) for name in inside] == [True, True, True, False]
    assert [can_score("process", {"rollout": name}, 0.5) for name in inside] == [True, True, False, False]
    assert can_score("process", {}, 0.5)


def test_the_list_of_rollouts_shows_which_continue_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    column = lines[0].index("continues rows")
    shown = {line.split()[0]: line[column:].split()[0] for line in lines[1:]}
    assert {name for name, value in shown.items() if value == "yes"} >= {"torch", "hf", "process", "sglang"}
    assert shown["vllm"] == shown["server"] == "no"


def test_a_process_declares_what_the_rollout_inside_supports() -> None:
    used = {name: used_capabilities("process", {"rollout": name}) for name in ("torch", "hf", "vllm")}
    assert [found.scores_candidates for found in used.values()] == [True, True, False]
    assert [found.scores_sampling for found in used.values()] == [True, True, False]
    assert [found.generates_packed for found in used.values()] == [True, False, False]
    assert not any(found.supports_adapter or found.keeps_rows for found in used.values())
    assert all("update_weights_bucket_megabytes" in found.reads for found in used.values())
