"""The reward model role, compared with transformers on the expected token ids."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import ppo_config
from support.processes import start_fork_server
from support.reward_models import NEWLINE, LengthReward, Negated, hf_scores, make_tiny_reward_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from camshaft.config import PPOConfig, Topology
from camshaft.controller import shutdown, spawn
from camshaft.controller.local import PRELOAD
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, ConfigError, EngineError
from camshaft.models.tiny import END
from camshaft.roles import RewardModelWorker
from camshaft.trainer.build import role_classes

pytestmark = pytest.mark.timeout(200)

PATH, INPUT = "reward_model.model.path", "reward_model.model.input_tokenizer"
QUESTIONS = ["1+2=", "10+20=", "3+", "7+8="]
ANSWERS = ["3", "30!", "", "fifteen"]


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with reward models in `same` (the policy's tokens) and `other` (other token ids and template)."""
    make_tiny_reward_model(home / "same")
    make_tiny_reward_model(home / "other", template=NEWLINE, turned=True)
    return home


def config_of(home: Path, model: str = "same", **overrides: Any) -> PPOConfig:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    where = {"reward_model.enable": True, PATH: home / model, INPUT: "null" if model == "same" else home / "actor"}
    return ppo_config(home, {**where, "reward_model.micro_batch_size_per_gpu": 2, **keys})


def built(config: PPOConfig) -> RewardModelWorker:
    worker = role_classes(config)[2](config, Topology(1))
    worker.init_model()
    return worker


def rows(*lengths: int, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_rows([torch.randint(3, 90, (length,), generator=generator) for length in lengths], torch.int64)


def batch_of(prompts: Ragged, responses: Ragged, **columns: Any) -> DataProto:
    mask = responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))
    return DataProto.from_dict({"prompts": prompts, "responses": responses, "response_mask": mask, **columns})


def token_rows(batch: DataProto) -> list[list[int]]:
    return [row.tolist() for row in Ragged.join(batch.ragged("prompts"), batch.ragged("responses")).rows()]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# -- the policy's own tokens ----------------------------------------------------------------------


def test_scores_are_the_logits_of_transformers_on_the_same_ids(home: Path) -> None:
    batch = batch_of(rows(3, 5, 2, 4), rows(4, 6, 1, 3, seed=1))
    actual = built(config_of(home)).compute_rm_score(batch)
    expected = hf_scores(home / "same", token_rows(batch))
    assert float(expected.std()) > 0.01
    close(actual["rm_scores"].sum(), expected)
    assert actual["rm_scores"].lengths.tolist() == [4, 6, 1, 3]
    assert actual["rm_truncated"].tolist() == [False] * 4


def test_scores_are_on_the_last_masked_in_token(home: Path) -> None:
    batch = batch_of(rows(3, 5), rows(4, 2, seed=1))
    mask = batch.ragged("response_mask")
    mask.values[3] = False  # a tool wrote the last token of the first row
    scores = built(config_of(home)).compute_rm_score(batch)["rm_scores"].values
    close(scores[[2, 5]], hf_scores(home / "same", token_rows(batch)))
    assert scores[[0, 1, 3, 4]].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "cut",
    [
        {"reward_model__micro_batch_size_per_gpu": 1},
        {"reward_model__micro_batch_size_per_gpu": "null", "reward_model__micro_batch_size": 3},
        {"reward_model__use_dynamic_bsz": True, "reward_model__forward_max_token_len_per_gpu": 24},
    ],
    ids=["one by one", "older key", "by tokens"],
)
def test_scores_do_not_depend_on_micro_batches(cut: dict[str, Any], home: Path) -> None:
    batch = batch_of(rows(3, 5, 2, 4, 9), rows(4, 6, 1, 3, 2, seed=1))
    scores = built(config_of(home, **cut)).compute_rm_score(batch)["rm_scores"].sum()
    close(scores, hf_scores(home / "same", token_rows(batch)))


@pytest.mark.parametrize("pads_with", [0, 2], ids=["its own pad token", "the token that ends a turn"])
def test_last_token_matches_transformers_for_responses_ending_with_pad(
    pads_with: int, home: Path, tmp_path: Path
) -> None:
    folder = make_tiny_reward_model(tmp_path / "rm", pad_token_id=pads_with)
    end: Any = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(END)
    assert end == 2
    responses = Ragged.from_rows([[10, 11, end], [12, end, end], [13, 14, 15]])
    batch = batch_of(rows(3, 5, 2), responses)
    scores = built(config_of(home, reward_model__model__path=folder)).compute_rm_score(batch)["rm_scores"].sum()
    close(scores, hf_scores(folder, token_rows(batch)))
    # So does a padded batch of transformers, which has such tokens as padding.
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    sequences = Ragged.join(batch.ragged("prompts"), responses)
    padded = sequences.padded("right", value=model.config.pad_token_id)
    with torch.no_grad():
        logits = model(padded, attention_mask=sequences.mask("right")).logits[:, 0]
    close(scores, logits)
    without = hf_scores(folder, [row[: row.index(end)] for row in token_rows(batch)[:2]])
    assert torch.allclose(scores[:2], without, atol=1e-4) == (pads_with == end)


def test_overlong_rows_are_truncated_on_the_left_and_counted(home: Path) -> None:
    batch = batch_of(rows(3, 5, 2), rows(4, 6, 1, seed=1))
    scores = built(config_of(home, reward_model__max_length=7)).compute_rm_score(batch)
    assert scores["rm_truncated"].tolist() == [False, True, False]
    close(scores["rm_scores"].sum(), hf_scores(home / "same", [row[-7:] for row in token_rows(batch)]))


def test_row_limit_defaults_to_prompt_plus_response_length(home: Path) -> None:
    assert config_of(home).max_scored_length() == 16 + 8
    assert config_of(home, reward_model__max_length=9).max_scored_length() == 9


# -- another tokenizer and template ---------------------------------------------------------------


def conversations(home: Path, **columns: Any) -> DataProto:
    """Return prompts with responses; all but the last end with the end-of-sequence token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "actor")
    end = tokenizer.convert_tokens_to_ids(END)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS
    ]
    responses = [tokenizer(text)["input_ids"] + [end] for text in ANSWERS[:-1]] + [tokenizer(ANSWERS[-1])["input_ids"]]
    return batch_of(Ragged.from_rows(prompts, torch.int64), Ragged.from_rows(responses, torch.int64), **columns)


def templated(folder: Path) -> list[list[int]]:
    """Return the token ids that the reward model expects, including the newline at the end."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids_of_rows = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        assert tokenizer.apply_chat_template(chat, tokenize=False).endswith("<|im_end|>\n")
        ids_of_rows.append(tokenizer.apply_chat_template(chat)["input_ids"])
    return ids_of_rows


def chats() -> list[Any]:
    return [[{"role": "user", "content": text}] for text in QUESTIONS]


@pytest.mark.parametrize("kept", ["messages", "text", "ids"])
def test_reward_input_uses_the_reward_models_template_and_tokenizer(kept: str, home: Path) -> None:
    config = config_of(home, "other", reward_model__max_length=80)
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "actor")
    columns = {
        "messages": {"raw_prompt": chats()},
        "text": {"raw_prompt": QUESTIONS},
        "ids": {"raw_input_ids": Ragged.from_rows([tokenizer(text)["input_ids"] for text in QUESTIONS])},
    }
    batch = conversations(home, **columns[kept])
    expected = templated(home / "other")
    assert tokenizer(QUESTIONS[0])["input_ids"] != AutoTokenizer.from_pretrained(home / "other")(QUESTIONS[0]).input_ids
    actual = built(config).compute_rm_score(batch)
    close(actual["rm_scores"].sum(), hf_scores(home / "other", expected))
    assert actual["rm_scores"].lengths.tolist() == batch["responses"].lengths.tolist()
    assert not bool(actual["rm_truncated"].any())


def test_a_templated_conversation_that_is_too_long_keeps_its_end(home: Path) -> None:
    expected = templated(home / "other")
    limit = sorted(map(len, expected))[1]
    actual = built(config_of(home, "other", reward_model__max_length=limit)).compute_rm_score(
        conversations(home, raw_prompt=chats())
    )
    assert actual["rm_truncated"].tolist() == [len(row) > limit for row in expected]
    close(actual["rm_scores"].sum(), hf_scores(home / "other", [row[-limit:] for row in expected]))


def test_left_truncation_keeps_the_bos_token(home: Path, tmp_path: Path) -> None:
    folder = make_tiny_reward_model(tmp_path / "rm", template="{{ bos_token }}" + NEWLINE)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "0"
    tokenizer.save_pretrained(folder)
    worker = built(config_of(home, "other", reward_model__model__path=folder, reward_model__max_length=20))
    read, truncated = worker.to_input(conversations(home, raw_prompt=chats()))
    assert truncated.all()
    assert [row[0].item() for row in read.rows()] == [tokenizer.bos_token_id] * 4
    ids = templated(folder)
    assert [row[1:].tolist() for row in read.rows()] == [row[-19:] for row in ids]


# -- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"reward_model__model__fsdp_config__param_offload": True}, id="rows", marks=pytest.mark.slow),
        pytest.param({"reward_model__ulysses_sequence_parallel_size": 2}, id="sequence", marks=pytest.mark.slow),
        pytest.param({"reward_model__model__fsdp_config__tensor_parallel_size": 2}, id="tensor"),
    ],
)
def test_scores_do_not_depend_on_the_number_of_ranks(layout: dict[str, Any], home: Path) -> None:
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.llama.modeling_llama")
    two = {"actor_rollout_ref__actor__strategy": "fsdp2", "trainer__n_gpus_per_node": 2}
    config = config_of(home, "other", reward_model__max_length=80, **two, **layout)
    worker = spawn(RewardModelWorker, config, Topology(2), world_size=2)
    try:
        worker.init_model()
        scores = worker.compute_rm_score(conversations(home, raw_prompt=chats()))
    finally:
        shutdown(worker)
    close(scores["rm_scores"].sum(), hf_scores(home / "other", templated(home / "other")))


# -- errors ---------------------------------------------------------------------------------------


def test_a_model_without_a_head_for_scores_is_an_error(home: Path) -> None:
    with pytest.raises(EngineError, match=r"head=reward\): score.weight is missing"):
        built(config_of(home, reward_model__model__path=home / "actor"))


def test_a_missing_chat_template_is_an_error_before_loading(home: Path, tmp_path: Path) -> None:
    folder = make_tiny_reward_model(tmp_path / "rm", template="")
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"has no chat template.*input_tokenizer=null"):
        built(config_of(home, "other", reward_model__model__path=folder))


def test_a_chat_template_error_names_the_row(home: Path, tmp_path: Path) -> None:
    folder = make_tiny_reward_model(tmp_path / "rm", template="{{ raise_exception('no thanks') }}")
    worker = built(config_of(home, "other", reward_model__model__path=folder))
    with pytest.raises(BatchError, match=r"row 0: .*no thanks"):
        worker.compute_rm_score(conversations(home, raw_prompt=chats()))


def test_a_batch_without_messages_names_their_source(home: Path) -> None:
    with pytest.raises(BatchError, match=r"raw_input_ids.*data/prompts"):
        built(config_of(home, "other")).compute_rm_score(conversations(home))


# -- custom classes -------------------------------------------------------------------------------


def test_a_custom_class_scores(home: Path) -> None:
    batch = batch_of(rows(3, 5), rows(4, 2, seed=1))
    config = config_of(home, reward_model__worker_cls="support.reward_models:LengthReward")
    assert role_classes(config)[2] is LengthReward
    assert built(config).compute_rm_score(batch)["rm_scores"].sum().tolist() == [4, 2]
    derived = config_of(home, reward_model__worker_cls="support.reward_models:Negated")
    assert role_classes(derived)[2] is Negated
    close(built(derived).compute_rm_score(batch)["rm_scores"].sum(), -hf_scores(home / "same", token_rows(batch)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("support.reward_models:IncompleteReward", "does not register compute_rm_score"),
        ("support.reward_models:make_tiny_reward_model", "is not a subclass of Worker"),
        ("support.reward_models:Nobody", "has no attribute 'Nobody'"),
        ("no_such_module:Mine", "the module 'no_such_module' does not exist"),
    ],
)
def test_a_class_without_scoring_is_an_error(name: str, message: str, home: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        role_classes(config_of(home, reward_model__worker_cls=name))
