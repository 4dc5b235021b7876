import pytest

from camshaft.data.loader import StatefulLoader
from camshaft.data.prompts import PromptOptions, load_prompts
from camshaft.data.sft import SFTOptions, load_sft
from camshaft.data.tables import read_rows
from camshaft.data.tasks import DATA_SOURCE, write_arithmetic
from camshaft.errors import ConfigError
from camshaft.rewards.auto import SOURCES

SMALL = {"left": (0, 9), "right": (0, 9), "num_train": 40, "num_heldout": 20}


def texts(path):
    return [row["prompt"][0]["content"] for row in read_rows(path, ["prompt"]).rows]


def test_the_ground_truth_is_the_result(tmp_path):
    operations = ("addition", "subtraction", "multiplication")
    paths = write_arithmetic(tmp_path, operations=operations, **SMALL)
    rows = read_rows([paths.train, paths.heldout], ["prompt", "reward_model", "data_source"]).rows
    signs = set()
    for row in rows:
        text = row["prompt"][0]["content"].removesuffix("=")
        assert row["reward_model"]["ground_truth"] == str(eval(text))
        assert row["data_source"] == DATA_SOURCE
        signs.add(next(sign for sign in "+-*" if sign in text[1:]))
    assert signs == set("+-*")


def test_splits_are_disjoint_up_to_commutation(tmp_path):
    paths = write_arithmetic(tmp_path, **SMALL)
    train, heldout = texts(paths.train), texts(paths.heldout)
    assert (len(set(train)), len(set(heldout))) == (40, 20)
    mirrored = {"+".join(reversed(text.removesuffix("=").split("+"))) + "=" for text in heldout}
    assert not set(train) & (set(heldout) | mirrored)


def test_operands_stay_in_their_ranges_ends_included(tmp_path):
    paths = write_arithmetic(tmp_path, left=(3, 5), right=(10, 11), num_train=5, num_heldout=1)
    operands = [
        tuple(map(int, text.removesuffix("=").split("+"))) for text in texts(paths.train) + texts(paths.heldout)
    ]
    assert sorted(operands) == [(a, b) for a in (3, 4, 5) for b in (10, 11)]


def test_the_same_arguments_write_the_same_files(tmp_path):
    a, b, c = (write_arithmetic(tmp_path / name, seed=seed, **SMALL) for name, seed in [("a", 1), ("b", 1), ("c", 2)])
    assert texts(a.train) == texts(b.train) != texts(c.train)
    assert a.train.read_bytes() == b.train.read_bytes()


def test_large_ranges_use_no_memory(tmp_path):
    big = (0, 10**9)
    assert len(texts(write_arithmetic(tmp_path, left=big, right=big, num_train=5, num_heldout=5).train)) == 5


def test_the_files_load_as_prompts_and_as_sft_rows(tmp_path, tokenizer):
    paths = write_arithmetic(tmp_path, **SMALL)
    prompts = load_prompts(paths.train, tokenizer, PromptOptions(max_prompt_length=9)).batch
    assert len(list(StatefulLoader(prompts, 8))) == 5
    sft = load_sft(paths.sft_train, tokenizer, SFTOptions(max_length=12)).batch
    text = tokenizer.decode(sft["input_ids"].rows()[0])
    assert text.startswith(tokenizer.decode(prompts["prompts"].rows()[0]))
    assert text.endswith(prompts["ground_truth"][0] + "<|im_end|>")


def test_a_built_in_reward_scores_the_data_set():
    assert DATA_SOURCE in SOURCES


def test_too_many_problems_is_an_error_with_the_total(tmp_path):
    with pytest.raises(ConfigError, match=r"num_train=90 and num_heldout=20 must .* at most 100, .* 10 x 10 operands"):
        write_arithmetic(tmp_path, **{**SMALL, "num_train": 90})


def test_too_many_problems_up_to_commutation_is_an_error(tmp_path):
    # 100 problems, 20 held out: up to 20 mirrored problems are excluded, so 80 are never available.
    with pytest.raises(ConfigError, match=r"num_train=80 exceeds .* the 20 held-out problems and their commuted forms"):
        write_arithmetic(tmp_path, **{**SMALL, "num_train": 80})


def test_an_unknown_operation_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError, match="unknown operation 'division'; use one of addition, subtraction, multiplication"
    ):
        write_arithmetic(tmp_path, operations=["division"])


def test_an_empty_range_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="at most 0"):
        write_arithmetic(tmp_path, left=(5, 3), right=(5, 3))


def test_only_the_chosen_response_of_a_pair_is_correct(tmp_path):
    paths = write_arithmetic(tmp_path, operations=("subtraction",), **SMALL)
    for split, pairs in ((paths.train, paths.preference_train), (paths.heldout, paths.preference_heldout)):
        truths = [row["reward_model"]["ground_truth"] for row in read_rows(split, ["reward_model"]).rows]
        rows = read_rows(pairs, ["prompt", "chosen", "rejected"]).rows
        assert [row["prompt"][0]["content"] for row in rows] == texts(split)
        assert [row["chosen"] for row in rows] == truths
        assert all(0 < abs(int(row["rejected"]) - int(row["chosen"])) <= 9 for row in rows)
