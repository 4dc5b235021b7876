"""`camshaft parity`: pairs that agree, and one faulty rollout for each kind of cause."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import Run, camshaft
from support.tiny import tiny_folder
from transformers import AutoModelForCausalLM

from camshaft.data import write_arithmetic
from camshaft.models.loader import load_tokenizer
from camshaft.parity import Pair, ParityCase, diagnosis
from camshaft.parity.tokens import compare_tokenizers, random_prompts
from camshaft.rollout import SamplingParams

FAULTY = "support.mismatched_rollouts:"
SMALL = ("--prompts", "4", "--prompt-length", "12", "--response-length", "12")
SHARP: dict[str, Any] = {"layers": 1, "hidden": 32, "initializer_range": 0.3, "tie_embeddings": False}


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return a model that prefers some tokens."""
    return tiny_folder(**SHARP)


def parity(folder: Path, rollout: str, *args: str, engine: str = "reference") -> Run:
    return camshaft("parity", "--engine", engine, "--rollout", rollout, "--model", str(folder), *SMALL, *args)


def cause(run: Run) -> str:
    """Return the kinds of the causes."""
    return " ".join(line.split(": ")[1] for line in run.out.splitlines() if line.startswith("LIKELY CAUSE"))


# -- comparison ------------------------------------------------------------------------------------


def test_difference_equals_that_of_rollout_and_transformers(folder: Path) -> None:
    pair = Pair(ParityCase("reference", "torch", str(folder), sampling=SamplingParams(max_tokens=6, temperature=0.7)))
    prompts = random_prompts(load_tokenizer(str(folder)), 3, 8, seed=1)
    comparison = pair.measure(prompts)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    worst = 0.0
    for prompt, response, engine, rollout in zip(
        prompts.rows(), comparison.responses.rows(), comparison.engine.rows(), comparison.rollout.rows(), strict=True
    ):
        with torch.no_grad():
            scores = (reference(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(
                -1
            )
        expected = scores.gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(engine.double(), expected, rtol=0, atol=2e-5)
        worst = max(worst, float((engine.double() - rollout.double()).abs().max()))
    assert comparison.worst == pytest.approx(worst, abs=1e-12)


def test_expert_choices_are_compared(folder: Path) -> None:
    experts = tiny_folder("mixtral", num_local_experts=4)
    run = parity(experts, "torch")
    assert run.status == 0, run.out + run.err
    assert re.search(r"routing mismatch +0 +0\n", run.out)
    assert "routing mismatch" not in parity(experts, "hf").out


def test_update_changes_engine_and_rollout(folder: Path) -> None:
    pair = Pair(ParityCase("reference", "torch", str(folder), sampling=SamplingParams(max_tokens=8)))
    prompts = random_prompts(load_tokenizer(str(folder)), 3, 8, seed=1)
    before = pair.measure(prompts)
    assert pair.update(before) > 0.05
    after = pair.measure(prompts)
    stale = before.with_engine(pair.log_probs(prompts, before.responses, 1.0))
    assert after.worst < 1e-4 < stale.worst


@pytest.mark.parametrize("args", [(), ("--temperature", "0.7"), ("--temperature", "0")], ids=["1", "0.7", "greedy"])
@pytest.mark.parametrize("rollout", ["torch", pytest.param("hf", marks=pytest.mark.slow)])
def test_pairs_agree_before_and_after_an_update(rollout: str, args: tuple[str, ...], folder: Path) -> None:
    run = parity(folder, rollout, *args)
    assert run.status == 0, run.out + run.err
    assert "engine and rollout agree" in run.out
    assert "after an update" in run.out


def test_sharded_engine_agrees_on_prompts_of_a_file(folder: Path, tmp_path: Path) -> None:
    write_arithmetic(tmp_path, left=(0, 20), right=(0, 20), num_train=8, num_heldout=8)
    run = parity(folder, "torch", "--data", str(tmp_path / "train.parquet"), engine="fsdp")
    assert run.status == 0, run.out + run.err
    assert "4 prompts" in run.out


# -- causes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        ("reference", ["--rollout-dtype", "bfloat16"]),
        pytest.param("reference", ["--dtype", "bfloat16"], marks=pytest.mark.slow),
        ("fsdp", ["--option", "mixed_precision.param_dtype=bfloat16"]),
    ],
    ids=["rollout", "engine", "inside the engine"],
)
def test_lower_precision_on_one_side_is_found(engine: str, args: list[str], folder: Path) -> None:
    run = parity(folder, "torch", *args, engine=engine)
    assert (run.status, cause(run)) == (1, "dtype"), run.out + run.err
    assert "bfloat16" in run.out.split("LIKELY CAUSE")[1]
    # A larger limit accepts the difference.
    run = parity(folder, "torch", *args, "--limit", "2", engine=engine)
    assert run.status == 0
    assert ("update skipped: bfloat16 weights lose small updates to rounding" in run.out) == ("--dtype" in args)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(("--top-p", "0.8"), id="top_p"),
        pytest.param(("--top-k", "5", "--temperature", "0.7"), id="top_k", marks=pytest.mark.slow),
    ],
)
def test_truncated_distribution_is_found(args: tuple[str, ...], folder: Path) -> None:
    run = parity(folder, "torch", *args)
    assert (run.status, cause(run)) == (1, "sampling"), run.out + run.err
    assert "without top_k and top_p" in run.out
    assert "rollout_is=token" in run.out


@pytest.mark.parametrize("args", [("--temperature", "0.7"), ("--top-p", "0.8")], ids=" ".join)
def test_raw_log_probs_are_found(args: tuple[str, ...], folder: Path) -> None:
    # With top_p the log-probs match the engine's, but not the sampled distribution.
    run = parity(folder, FAULTY + "RawLogProbs", *args)
    assert (run.status, cause(run)) == (1, "sampling"), run.out + run.err
    assert "raw log-probs" in run.out


def test_sampling_settings_of_the_generator_are_found(folder: Path) -> None:
    run = parity(folder, FAULTY + "OwnTemperature")
    assert (run.status, cause(run)) == (1, "sampling"), run.out + run.err
    assert "temperature 0.6 instead of 1" in run.out
    run = parity(folder, FAULTY + "OwnTopK")
    assert (run.status, cause(run)) == (1, "sampling"), run.out + run.err
    assert "the rollout truncates the distribution" in run.out


def test_transposed_weight_is_named(folder: Path) -> None:
    run = parity(folder, FAULTY + "Transposed")
    assert (run.status, cause(run)) == (1, "weights"), run.out + run.err
    assert "model.layers.0.self_attn.o_proj.weight" in run.out


def test_stale_weight_is_named(folder: Path) -> None:
    run = parity(folder, FAULTY + "StaleHead")
    assert (run.status, cause(run)) == (1, "weights"), run.out + run.err
    assert "Without effect: lm_head.weight." in run.out
    assert "after one update" in run.out


def test_unused_weight_is_named(folder: Path) -> None:
    run = parity(folder, FAULTY + "WithoutNorm")
    assert (run.status, cause(run)) == (1, "weights"), run.out + run.err
    assert "Without effect: model.layers.0.post_attention_layernorm.weight." in run.out


@pytest.mark.parametrize(
    ("fault", "message"), [("AddsStart", "with <|im_start|> in front"), ("DropsFirst", "without their first token")]
)
def test_changed_prompts_are_found(fault: str, message: str, folder: Path) -> None:
    run = parity(folder, FAULTY + fault)
    assert (run.status, cause(run)) == (1, "template"), run.out + run.err
    assert message in run.out


def test_different_tokenizer_is_found(folder: Path, tmp_path: Path) -> None:
    other = load_tokenizer(str(folder))
    other.eos_token = other.pad_token
    other.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    run = parity(folder, "torch", "--tokenizer", str(tmp_path))
    assert (run.status, cause(run)) == (1, "template"), run.out + run.err
    assert "eos_token_id: 2 and 0" in run.out
    assert "the chat templates render a message as" in run.out
    assert compare_tokenizers(load_tokenizer(str(folder)), load_tokenizer(str(folder))) == []


def test_fault_is_found_despite_lower_precision(folder: Path) -> None:
    run = parity(folder, FAULTY + "AddsStart", "--rollout-dtype", "bfloat16")
    assert (run.status, cause(run)) == (1, "template"), run.out + run.err


def test_unexplained_difference_is_unknown(folder: Path) -> None:
    run = parity(folder, FAULTY + "NoisyLogProbs")
    assert (run.status, cause(run)) == (1, "unknown"), run.out + run.err
    assert "the weight sync is correct for every weight, and each has an effect." in run.out
    assert "update skipped: engine and rollout already differ before the update" in run.out


@pytest.mark.parametrize(
    ("name", "message"),
    [("MAX_TENSORS", "are too many"), pytest.param("MAX_SECONDS", "would take", marks=pytest.mark.slow)],
)
def test_skipped_experiment_is_reported(name: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, name, 0)
    run = parity(folder, FAULTY + "NoisyLogProbs")
    assert (run.status, cause(run)) == (1, "unknown"), run.out + run.err
    assert message in run.out
    assert "the effect of each was not tested" in run.out
    run = parity(folder, FAULTY + "StaleHead")
    assert (run.status, cause(run)) == (1, "weights"), run.out + run.err
    assert "some effect" not in run.out
    assert "was not tested" in run.out


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rollout", "trch"], "Did you mean 'torch'?"),
        (["--engine", "fdsp"], "Did you mean 'fsdp'?"),
        (["--model", "/nowhere"], "--model: '/nowhere' is neither a folder nor a model"),
        (["--tokenizer", "/nowhere"], "--tokenizer: '/nowhere' is neither a folder nor a model"),
        (["--limit", "0"], "--limit"),
        (["--limit", "nan"], "--limit"),
        (["--prompts", "0"], "--prompts"),
        (["--top-p", "2"], "top_p must be above 0"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--response-length", "0"], "max_tokens must be at least 1"),
        (["--data", "/nowhere.parquet"], "--data /nowhere.parquet"),
        (["--option", "fsdp_size"], "KEY=VALUE"),
    ],
)
def test_invalid_argument_is_rejected(args: list[str], message: str, folder: Path) -> None:
    run = parity(folder, "torch", *args)
    assert run.status == 2, run.err  # 1 is a difference
    assert message in run.err
