"""Responses in the run folder: which rows have values per token, where tokens end, and which files remain."""

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from camshaft import storage
from camshaft.config.schema.trainer import SamplesConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.tracking import samples
from camshaft.tracking.samples import SampleWriter, choose_rows, least_useful, token_ends

BYTES = pre_tokenizers.ByteLevel.alphabet()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer in which some tokens are words and others parts of a character."""
    words = ["he", "llo", "\u0120w", "or"]
    vocabulary = {token: number for number, token in enumerate([*sorted(BYTES), *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ids_of(tokenizer: Tokenizer, tokens: list[str]) -> list[int]:
    return [number for token in tokens if (number := tokenizer.token_to_id(token)) is not None]


def test_tokens_end_where_their_text_ends(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, ["he", "llo", "\u0120w", "or", "l", "d", "!"])
    text = tokenizer.decode(ids)
    oracle = [len(tokenizer.decode(ids[: count + 1])) for count in range(len(ids))]
    assert text == "hello world!"
    assert token_ends(ids, text, tokenizer.decode_batch, {}) == oracle == [2, 5, 7, 9, 10, 11, 12]


@pytest.mark.parametrize("text", ["a\U0001f600b", "\u4e2d\u6587", "x\u00e9\u00e9y", "\ufffd?", "a  b\n"])
def test_parts_of_a_character_end_within_it(text: str, tokenizer: Tokenizer) -> None:
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = ids_of(tokenizer, list(alphabet.pre_tokenize_str(text)[0][0]))
    assert tokenizer.decode(ids) == text
    ends = token_ends(ids, text, tokenizer.decode_batch, {})
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    if text == "a\U0001f600b":  # four tokens of one character
        assert (ends[0], ends[1:4], ends[5]) == (1, [1, 1, 1], 3)


def test_the_texts_of_tokens_are_decoded_once(tokenizer: Tokenizer) -> None:
    calls: list[int] = []

    def decode(ids: list[list[int]]) -> list[str]:
        calls.append(len(ids))
        return tokenizer.decode_batch(ids)

    ids, pieces = ids_of(tokenizer, ["he", "llo", "he"]), dict[int, str]()
    assert token_ends(ids, "hellohe", decode, pieces) == token_ends(ids, "hellohe", decode, pieces) == [2, 5, 7]
    assert calls == [2]
    assert token_ends([], "", decode, pieces) == []


GROUPS = [str(row // 4) for row in range(40)]


def test_best_worst_and_largest_gap_keep_their_groups() -> None:
    scores, gaps = [0.5] * 40, [0.0] * 40
    scores[5], scores[18], gaps[33] = 1.0, 0.0, 2.0
    chosen = choose_rows(GROUPS, scores, gaps, [10] * 40, count=16, seed=1)
    assert {4, 5, 6, 7, 16, 17, 18, 19, 32, 33, 34, 35} < set(chosen)
    assert len(chosen) == 16
    assert all(sum(GROUPS[row] == group for row in chosen) in (0, 4) for group in set(GROUPS))
    assert choose_rows(GROUPS, scores, gaps, [10] * 40, count=16, seed=1) == chosen


def test_the_random_group_differs_between_steps() -> None:
    arguments = (GROUPS, [0.0] * 40, [0.0] * 40, [1] * 40, 8)
    assert len({tuple(choose_rows(*arguments, seed)) for seed in range(20)}) > 3


def test_a_group_beyond_the_limits_keeps_the_notable_rows() -> None:
    scores = [float(row == 9) for row in range(12)]
    chosen = choose_rows(["a"] * 12, scores, [float(row == 7) for row in range(12)], [1] * 12, count=4, seed=0)
    assert len(chosen) == 4
    assert {0, 7, 9} < set(chosen)


def test_a_long_response_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_TOKENS", 100)
    assert choose_rows(["a", "b"], [1.0, 0.0], [0.0, 0.0], [1000, 1000], count=32, seed=0) == [0]


def test_remaining_steps_become_sparser_with_their_age() -> None:
    kept: list[int] = []
    for step in range(1, 2001):
        kept.append(step)
        if len(kept) > 60:
            del kept[least_useful(kept)]
    assert kept[-8:] == list(range(1993, 2001))
    assert kept[0] == 1
    gaps = [(2000 - early, late - early) for early, late in pairwise(kept)]
    assert all(gap <= 2 + 0.35 * age for age, gap in gaps)


@pytest.fixture
def writer(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., SampleWriter]:
    config = SamplesConfig(enable=True, token_rows=4, max_gb=1.0)
    return lambda **changes: SampleWriter(tmp_path, config.model_copy(update=changes), tokenizer.decode_batch)


def batch_of(tokenizer: Tokenizer, rows: int = 6) -> DataProto:
    """Build two groups of responses without a reference and a critic."""
    ids = ids_of(tokenizer, ["he", "llo", "!"])
    responses = Ragged.from_rows([ids[: 1 + row % 3] for row in range(rows)])
    like = responses.map(lambda values: torch.arange(len(values)).float())
    columns = {
        "prompts": Ragged.from_rows([ids[row // 3 :] for row in range(rows)]),
        "responses": responses,
        "response_mask": responses.map(lambda values: torch.ones_like(values, dtype=torch.bool)),
        **dict.fromkeys(
            ("token_level_scores", "token_level_rewards", "advantages", "returns", "rollout_log_probs"), like
        ),
        "old_log_probs": like.map(lambda values: values + 0.5),
        "finished": torch.tensor([row % 2 == 0 for row in range(rows)]),
        "uid": [f"0/{row // 3}" for row in range(rows)],
        "data_source": ["sums"] * rows,
        "ground_truth": ["3", 3, None, ["a"], "x", "y"][:rows],
        "score_parts": [{}, {"acc": 1.0}, *[{}] * (rows - 2)],
        "score_failure": ["error", *[None] * (rows - 1)],
    }
    return DataProto.from_dict(columns)


def test_a_file_has_all_rows_and_values_of_few(writer: Callable[..., SampleWriter], tokenizer: Tokenizer) -> None:
    target = writer()
    target.write(batch_of(tokenizer), 7)
    rows = parquet.read_table(target.folder / "step_7.parquet").to_pylist()
    assert [row["response"] for row in rows] == ["he", "hello", "hello!"] * 2
    assert [row["prompt"] for row in rows] == ["hello!"] * 3 + ["llo!"] * 3
    assert [row["ground_truth"] for row in rows] == ["3", "3", "null", '["a"]', "x", "y"]
    assert [row["score"] for row in rows[:3]] == [0.0, 1.0 + 2.0, 3.0 + 4.0 + 5.0]
    assert [row["score/acc"] for row in rows] == [None, 1.0, None, None, None, None]
    assert [row["failure"] for row in rows] == ["error", *[None] * 5]
    assert [row["gap"] for row in rows] == [0.5] * 6
    assert [row["finished"] for row in rows] == [True, False] * 3
    with_tokens = [row for row in rows if row["token_ends"] is not None]
    assert len(with_tokens) in (3, 4)
    assert all(row["token_ends"][-1] == len(row["response"]) for row in with_tokens)
    assert all(len(row["old_log_probs"]) == row["response_tokens"] for row in with_tokens)
    assert not {"ref_log_prob", "values", "entropy"} & rows[0].keys()


def test_a_step_takes_a_few_bytes_of_memory(writer: Callable[..., SampleWriter], tokenizer: Tokenizer) -> None:
    target, batch = writer(), batch_of(tokenizer)

    def size() -> int:
        return sum(sys.getsizeof(value) for value in vars(target).values())

    target.write(batch, 1)
    before = size()
    for step in range(2, 202):
        target.write(batch, step)
    assert (size() - before) / 200 < 25


def test_files_of_a_run_stay_below_the_limit(writer: Callable[..., SampleWriter], tokenizer: Tokenizer) -> None:
    first = writer()
    first.write(batch_of(tokenizer), 1)
    size = (first.folder / "step_1.parquet").stat().st_size
    target = writer(max_gb=size * 12 / 1e9)
    target.start(resumed_step=1)
    for step in range(2, 40):
        target.write(batch_of(tokenizer), step)
    left = sorted(int(path.stem.removeprefix("step_")) for path in target.folder.iterdir())
    assert sum(path.stat().st_size for path in target.folder.iterdir()) <= size * 12
    assert left[-8:] == list(range(32, 40))
    assert left[0] == 1


def test_a_resumed_run_deletes_its_later_files(writer: Callable[..., SampleWriter], tokenizer: Tokenizer) -> None:
    first = writer()
    for step in (1, 2, 3):
        first.write(batch_of(tokenizer), step)
    folder = first.folder / "step_4.parquet.unfinished"
    with suppress(ZeroDivisionError), storage.new_file(first.folder / "step_4.parquet"):
        shutil.copytree(folder, first.folder / "killed")
        raise ZeroDivisionError
    (first.folder / "killed").rename(folder)
    (first.folder / "notes.txt").write_text("foreign")
    (first.folder / "step_5.parquet").write_text("foreign")
    writer().start(resumed_step=2)
    names = ["notes.txt", "step_1.parquet", "step_2.parquet", "step_5.parquet"]
    assert sorted(path.name for path in first.folder.iterdir()) == names
    first.write(batch_of(tokenizer), 5)
    assert (first.folder / "step_5.1.parquet").read_text() == "foreign"
    writer().start(resumed_step=None)
    assert sorted(path.name for path in first.folder.parent.iterdir()) == ["samples.1"]


def test_a_file_that_cannot_be_accessed_does_not_end_a_resumed_run(
    writer: Callable[..., SampleWriter], tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    target = writer()
    target.write(batch_of(tokenizer), 1)
    (target.folder / "step_2.parquet").symlink_to("nothing")
    (target.folder / "step_3.parquet").mkdir()
    writer().start(resumed_step=2)
    messages = sorted(record.getMessage() for record in caplog.records)
    assert [message.split("samples/")[1].split(" cannot")[0] for message in messages] == [
        "step_2.parquet",
        "step_3.parquet",
    ]
    assert "No such file or directory. The run continues without them" in messages[0]


def test_lone_surrogates_are_escaped(writer: Callable[..., SampleWriter], tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch = batch_of(tokenizer).with_columns(ground_truth=["a\ud800"] * 6, data_source=["\udfff"] * 6)
    writer().write(batch, 1)
    (row, *_) = parquet.read_table(tmp_path / "samples" / "step_1.parquet").to_pylist()
    assert (row["ground_truth"], row["data_source"]) == ("a\\ud800", "\\udfff")


def test_a_folder_that_cannot_be_written_costs_one_warning(
    writer: Callable[..., SampleWriter], tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").write_text("")
    target = writer()
    for step in (1, 2):
        target.write(batch_of(tokenizer), step)
    assert [record.getMessage()[:32] for record in caplog.records] == ["the responses of step 1 cannot b"]


def test_lost_files_are_named_when_a_run_resumes(
    writer: Callable[..., SampleWriter], tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    first = writer()
    for step in (2, 4, 5, 6, 7):
        first.write(batch_of(tokenizer), step)
    recorded = first.stored_steps()
    assert recorded == [[2, 2], [4, 7]]
    first.write(batch_of(tokenizer), 8)
    for step in (2, 5):
        (first.folder / f"step_{step}.parquet").unlink()
    (first.folder / "step_6.parquet").write_bytes(b"")
    second = writer()
    second.start(7, recorded)
    assert caplog.messages == [
        f"{first.folder} lacks the responses of steps 2, 5-6, which it contained when step 7 was saved"
    ]
    assert second.stored_steps() == [[4, 4], [7, 7]], "a lost file is named once"


def test_files_deleted_because_of_the_limit_are_not_lost(
    writer: Callable[..., SampleWriter], tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    measured = writer()
    size = measured.write(batch_of(tokenizer), 1).stat().st_size
    limit = {"max_gb": 5.5 * size / 1e9}
    for saved in range(2, 9):  # the checkpoint of this step, after which the run writes four more files and is killed
        shutil.rmtree(measured.folder)
        killed = writer(**limit)
        for step in range(1, saved + 1):
            killed.write(batch_of(tokenizer), step)
        recorded = killed.stored_steps()
        for step in range(saved + 1, saved + 5):
            killed.write(batch_of(tokenizer), step)
        writer(**limit).start(saved, recorded)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("camshaft")]
    assert messages == []  # a thread of a test of another library may still log
