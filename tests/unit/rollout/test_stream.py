"""Streams of answers over any rollout; the oracle is a call of `generate_sequences` for each row alone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from camshaft import subprocesses
from camshaft.config.backends import TORCH
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import Answer, Generation, SamplingParams, Stream, open_stream
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.builtin.scheduler import Scheduler
from camshaft.rollout.hf import HFRollout
from camshaft.rollout.sampling import restart_seeds
from camshaft.rollout.stream import WaveStream

ROUNDING = 1e-5
SAMPLING = SamplingParams(12, ignore_eos=True)


class Waves(TorchRollout):
    """The built-in rollout with a stream by waves."""

    def open_stream(self) -> Stream:
        return WaveStream(self)


@pytest.fixture(scope="module", params=[TorchRollout, Waves, HFRollout])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return RolloutHarness(request.param, tmp_path_factory.mktemp("models")).case(max_num_seqs=64)


@pytest.fixture
def stream(case: Case) -> Iterator[Stream]:
    with open_stream(case.rollout) as stream:
        yield stream


def take(stream: Stream, count: int) -> dict[int | str, Answer]:
    """Return the next `count` answers by row."""
    answers: dict[int | str, Answer] = {}
    deadline = time.monotonic() + 60
    while len(answers) < count:
        assert time.monotonic() < deadline
        answers |= {answer.row_id: answer for answer in stream.take(1.0)}
    return answers


def alone(case: Case, tokens: list[int], sampling: SamplingParams, seed: int) -> tuple[list[int], Tensor, bool]:
    out = case.rollout.generate_sequences(Ragged.from_rows([tokens], torch.int64), sampling, torch.tensor([seed]))
    return out.responses.values.tolist(), out.log_probs.values, bool(out.finished)


def test_rows_with_own_limits_are_those_of_calls(case: Case, stream: Stream) -> None:
    prompts = [list(range(3, 5 + row)) for row in range(8)]
    options = [replace(SamplingParams(1 + row, stop_token_ids=(7,)), top_p=(1.0, 0.9)[row % 2]) for row in range(8)]
    for row, (prompt, sampling) in enumerate(zip(prompts, options, strict=True)):
        stream.put(row, prompt, sampling, seed=100 + row)
    answers = take(stream, 8)
    for row, (prompt, sampling) in enumerate(zip(prompts, options, strict=True)):
        tokens, log_probs, finished = alone(case, prompt, sampling, 100 + row)
        answer = answers[row]
        assert answer.tokens == tokens
        assert (torch.tensor(answer.log_probs) - log_probs).abs().max() < ROUNDING
        assert answer.reason == ("stop" if finished else "length")
        assert answer.versions == [case.rollout.version] * len(tokens)


def test_turns_of_a_row_are_one_row(case: Case, stream: Stream) -> None:
    context = [5, 9, 4]
    for turn in range(3):
        stream.put("row", context, SAMPLING, seed=3)
        answer = take(stream, 1)["row"]
        assert answer.tokens == alone(case, context, SAMPLING, 3)[0]
        context = [*context, *answer.tokens, 6 + turn]


def test_interrupted_answers_continue(case: Case, stream: Stream) -> None:
    sampling = SamplingParams(16, ignore_eos=True, presence_penalty=1.5)
    for row in range(4):
        stream.put(row, [5, 9, 4 + row], sampling, seed=row)
    interrupted = {answer.row_id: answer for answer in stream.interrupt()}
    answers = {row: answer.tokens for row, answer in take(stream, 4 - len(interrupted)).items()}
    for row, answer in interrupted.items():
        assert answer.reason == "interrupted"
        stream.put(row, [5, 9, 4 + int(row)], sampling, seed=int(row), generated=answer.tokens)
    answers |= {row: interrupted[row].tokens + rest.tokens for row, rest in take(stream, len(interrupted)).items()}
    for row in range(4):
        assert answers[row] == alone(case, [5, 9, 4 + row], sampling, row)[0]


def test_generated_tokens_count_towards_the_limit(case: Case, stream: Stream) -> None:
    whole = alone(case, [5, 9, 4], SAMPLING, 1)[0]
    stream.put(0, [5, 9, 4], SAMPLING, seed=1, generated=whole[:5])
    stream.put(1, [5, 9, 4], replace(SAMPLING, max_tokens=7), seed=1, generated=whole[:5])
    answers = take(stream, 2)
    assert (answers[0].tokens, answers[1].tokens) == (whole[5:], whole[5:7])


def test_a_closed_row_has_no_answer(case: Case, stream: Stream) -> None:
    stream.put(0, [5, 9], SAMPLING, seed=1)
    stream.put(1, [5, 9], SAMPLING, seed=2)
    stream.close(0)
    stream.close("unknown")
    assert take(stream, 1)[1].tokens == alone(case, [5, 9], SAMPLING, 2)[0]
    stream.put(0, [5, 9], SAMPLING, seed=1)  # a new row
    assert take(stream, 1)[0].tokens == alone(case, [5, 9], SAMPLING, 1)[0]


def test_a_row_has_one_answer_at_a_time(stream: Stream) -> None:
    stream.put(0, [5, 9], SAMPLING, seed=1)
    with pytest.raises(RolloutError, match="row 0 has an answer that has not been taken"):
        stream.put(0, [5, 9], SAMPLING, seed=1)


def test_an_empty_stream_returns_after_its_time(stream: Stream) -> None:
    start = time.monotonic()
    assert stream.take(0.05) == []
    assert 0.04 < time.monotonic() - start < 5


def test_a_stopped_stream_says_so(case: Case) -> None:
    with WaveStream(case.rollout) as stream:
        pass
    with pytest.raises(RolloutError, match="has been stopped"):
        stream.put(0, [5], SAMPLING, seed=1)
    with pytest.raises(RolloutError, match="has been stopped"):
        stream.take(10.0)


class Held(TorchRollout):
    """Waits before each call, counts the rows of the calls, and fails for the token 1."""

    gate: threading.Event
    capabilities = replace(TORCH, continues_rows=False, keeps_rows=False)

    def generate_sequences(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None, generated: Ragged | None = None
    ) -> Generation:
        assert self.gate.wait(30)
        self.calls = [*getattr(self, "calls", []), len(prompts)]
        if 1 in prompts.values.tolist():
            raise RolloutError("the model's logits are not finite")
        return super().generate_sequences(prompts, sampling, seeds, generated)


@pytest.fixture
def held(tmp_path: Path) -> Case:
    case = RolloutHarness(Held, tmp_path).case()
    case.rollout.gate = threading.Event()  # pyright: ignore
    return case


def test_rows_that_arrive_during_a_call_share_the_next_one(held: Case) -> None:
    rollout = held.rollout
    assert isinstance(rollout, Held)
    with WaveStream(rollout) as stream:
        stream.put(0, [5], SAMPLING, seed=1)
        time.sleep(0.1)
        for row in range(1, 6):
            stream.put(row, [5], SAMPLING, seed=row)
        rollout.gate.set()
        take(stream, 6)
    assert rollout.calls == [1, 5]


def test_the_seed_of_an_answer_depends_on_its_position(held: Case) -> None:
    held.rollout.gate.set()  # pyright: ignore
    with WaveStream(held.rollout) as stream:
        stream.put(0, [5, 9], SAMPLING, seed=1)
        first = take(stream, 1)[0].tokens
        assert first == alone(held, [5, 9], SAMPLING, 1)[0]
        context = [5, 9, *first, 6]
        stream.put(0, context, SAMPLING, seed=1)
        second = take(stream, 1)[0].tokens
    (seed,) = restart_seeds(torch.tensor([1]), torch.tensor([len(first) + 1])).tolist()
    assert second == alone(held, context, SAMPLING, seed)[0]
    assert second != alone(held, context, SAMPLING, 1)[0]


def test_an_error_of_the_rollout_is_raised(held: Case) -> None:
    held.rollout.gate.set()  # pyright: ignore
    with WaveStream(held.rollout) as stream:
        stream.put(0, [1], SAMPLING, seed=1)
        with pytest.raises(RolloutError, match=r"the rollout has failed: .*not finite"):
            stream.take(30.0)
        with pytest.raises(RolloutError, match=r"the rollout has failed: .*not finite"):
            stream.put(1, [5], SAMPLING, seed=1)


def test_an_option_without_support_fails_alone(held: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "capabilities", replace(Held.capabilities, sampling=frozenset()))
    held.rollout.gate.set()  # pyright: ignore
    with WaveStream(held.rollout) as stream:
        with pytest.raises(RolloutError, match=r"Held does not support min_p=0.5"):
            stream.put(0, [5], replace(SAMPLING, min_p=0.5), seed=1)
        stream.put(0, [5], SAMPLING, seed=1)
        assert take(stream, 1)[0].reason == "length"


def test_a_long_stop_is_logged(held: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.1)
    with WaveStream(held.rollout) as stream:
        stream.put(0, [5], SAMPLING, seed=1)
        time.sleep(0.1)
        threading.Timer(1.0, held.rollout.gate.set).start()  # pyright: ignore
    assert "rollout stream: no answer from the model, which generates 1 rows" in caplog.text


def test_a_waiting_row_is_interrupted_without_tokens(held: Case) -> None:
    rollout = held.rollout
    assert isinstance(rollout, Held)
    with WaveStream(rollout) as stream:
        stream.put(0, [5], SAMPLING, seed=1)
        time.sleep(0.1)
        stream.put(1, [5], SAMPLING, seed=1)
        threading.Timer(0.1, rollout.gate.set).start()
        assert stream.interrupt() == [Answer(1, [], [], [], "interrupted")]
        assert take(stream, 1)[0].reason == "length"


class Counting(TorchRollout):
    """Records the number of cached tokens of each row and call."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.cached: list[int] = []

    def generate_sequences(self, *arguments: Any, **options: Any) -> Generation:
        out = super().generate_sequences(*arguments, **options)
        assert out.num_cached is not None
        self.cached += out.num_cached.tolist()
        return out


def test_a_rollout_keeps_the_rows_of_a_stream(tmp_path: Path) -> None:
    rollout = RolloutHarness(Counting, tmp_path).case().rollout
    assert isinstance(rollout, Counting)
    with WaveStream(rollout) as stream:
        stream.put("a", [3, 4, 5], SAMPLING, seed=1)
        answer = take(stream, 1)["a"]
        context = [3, 4, 5, *answer.tokens, 8]
        stream.put("a", context, SAMPLING, seed=1)
        take(stream, 1)
        stream.close("a")
        stream.put("a", context, SAMPLING, seed=1)
        take(stream, 1)
    assert rollout.cached == [0, 3 + 12 - 1, 0]
    assert rollout.kept.num_bytes == 0


class Stepped(TorchRollout):
    """Makes a step for each permit."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.permits = threading.Semaphore(0)

    @contextmanager
    def _scheduler(self, *arguments: Any, **options: Any) -> Iterator[Scheduler]:
        with super()._scheduler(*arguments, **options) as scheduler:
            step = scheduler.step

            def permitted() -> None:
                assert self.permits.acquire(timeout=60)
                step()

            scheduler.step = permitted
            yield scheduler


@pytest.fixture
def stepped(tmp_path: Path) -> Case:
    return RolloutHarness(Stepped, tmp_path).case()


def whole(case: Case, tokens: list[int], seed: int) -> list[int]:
    """Return the answer of a stepped rollout to a row alone."""
    assert isinstance(case.rollout, Stepped)
    case.rollout.permits.release(1000)
    answer = alone(case, tokens, SAMPLING, seed)[0]
    case.rollout.permits = threading.Semaphore(0)
    return answer


def test_a_row_joins_and_leaves_while_others_are_generated(stepped: Case) -> None:
    rollout = stepped.rollout
    assert isinstance(rollout, Stepped)
    long, short = whole(stepped, [5, 9], 1), whole(stepped, [5, 4], 2)[:2]
    with open_stream(rollout) as stream:
        stream.put(0, [5, 9], SAMPLING, seed=1)
        rollout.permits.release(3)  # the prompt, and two steps
        while rollout.permits._value:
            time.sleep(0.001)
        stream.put(1, [5, 4], replace(SAMPLING, max_tokens=2), seed=2)
        rollout.permits.release(4)  # at most one step before row 1 joins, its prompt and a step, and one behind it
        assert take(stream, 1)[1].tokens == short
        threading.Timer(0.1, rollout.permits.release).start()
        (interrupted,) = stream.interrupt()
        assert (interrupted.row_id, interrupted.reason) == (0, "interrupted")
        assert 4 <= len(interrupted.tokens) < 12
        rollout.permits.release(1000)
        stream.put(0, [5, 9], SAMPLING, seed=1, generated=interrupted.tokens)
        rest = take(stream, 1)[0]
    assert interrupted.tokens + rest.tokens == long
    assert rest.num_cached == len([5, 9]) + len(interrupted.tokens) - 1


def test_a_row_that_is_closed_while_it_is_generated_leaves(stepped: Case) -> None:
    rollout = stepped.rollout
    assert isinstance(rollout, Stepped)
    long, other = whole(stepped, [5, 9], 1), whole(stepped, [5, 4], 2)
    with open_stream(rollout) as stream:
        for row, tokens in enumerate(([5, 9], [5, 4])):
            stream.put(row, tokens, SAMPLING, seed=1 + row)
        rollout.permits.release(2)
        while rollout.permits._value:
            time.sleep(0.001)
        stream.close(0)
        stream.put(0, [5, 9], SAMPLING, seed=1)  # a new row with the same name
        rollout.permits.release(1000)
        answers = take(stream, 2)
    assert (answers[0].tokens, answers[1].tokens) == (long, other)
    assert rollout.kept.num_bytes == 0


def test_rows_of_several_threads_are_those_of_calls(case: Case) -> None:
    options = [
        SamplingParams(20, stop_token_ids=(7,), presence_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(16, top_k=12, temperature=0.8),
    ]
    played: dict[str, list[tuple[list[int], Answer]]] = {}
    answers: dict[int | str, Answer] = {}
    has_answer = threading.Condition()

    def play(name: str, number: int, stream: Stream) -> None:
        context = [3 + number % 5, *range(4, 8 + number % 3)]
        for turn in range(3):
            stream.put(name, context, options[number % 2], seed=number)
            with has_answer:
                assert has_answer.wait_for(lambda: name in answers, 120)
                answer = answers.pop(name)
            played.setdefault(name, []).append((context, answer))
            context = [*context, *answer.tokens, 8 + turn]

    with open_stream(case.rollout) as stream:
        threads = [threading.Thread(target=play, args=(str(i), i, stream), daemon=True) for i in range(24)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken = {answer.row_id: answer for answer in stream.take(0.05)}
            with has_answer:
                answers.update(taken)
                has_answer.notify_all()
    assert [len(turns) for turns in played.values()] == [3] * 24
    for name, turns in played.items():
        for context, answer in turns if case.rollout.capabilities.continues_rows else turns[:1]:
            assert answer.tokens == alone(case, context, options[int(name) % 2], int(name))[0]
