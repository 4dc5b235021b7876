"""The roofline: counts by hand and by torch's counter, and the line of a result."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import ppo_step
import roofline
import train_step
import workload
from roofline import Group, Rates, Work

from camshaft.models.tiny import make_tiny_model

SHAPE = workload.Shape(hidden=4, layers=2, heads=2, kv_heads=1, intermediate=8, vocab_size=10)
# Of each layer: q and o 4 x 4, k and v 4 x 2, gate, up and down 4 x 8.
LAYERS = 2 * (32 + 16 + 96)
GROUP = Group(prompt=3, responses=[3, 1])
# A prompt of 3 and two tokens of the first response pass through the layers. The last prompt token and both of these
# predict a token. The prompt's tokens attend to 1, 2 and 3 tokens, the response's to 4 and 5.
TOKENS, PREDICTING, PAIRS = 5, 3, 15
FORWARD = 2 * LAYERS * TOKENS + 4 * 2 * 4 * PAIRS + 2 * 40 * PREDICTING
CRITICS_FORWARD = 2 * LAYERS * TOKENS + 4 * 2 * 4 * PAIRS + 2 * 4 * PREDICTING
HIDDEN = 3 * 4 * TOKENS  # inputs of two blocks and of the head


def test_the_tokens_of_a_group_are_counted_by_hand() -> None:
    assert SHAPE.weights_of_layers() == LAYERS
    assert (GROUP.tokens(), GROUP.predicting(), GROUP.pairs()) == (TOKENS, PREDICTING, PAIRS)
    # The second token of the first response reads only the prompt; the third token reads one more.
    assert GROUP.read_again() == 3 + (3 + 1)


def test_an_evaluation_is_counted_by_hand() -> None:
    assert roofline.evaluation(SHAPE, [GROUP]) == Work(FORWARD, 4 * (LAYERS + 40 + 2 * HIDDEN))
    assert roofline.evaluation(SHAPE, [GROUP], "critic") == Work(CRITICS_FORWARD, 4 * (LAYERS + 4 + 2 * HIDDEN))


def test_an_update_is_counted_by_hand() -> None:
    # In each of two steps, both passes read weights; gradients are written, read and read; two moments and the
    # weights read and written. Hidden states are written, read, and read again, their gradients written and read.
    actor = 2 * (2 * (LAYERS + 40) + 9 * (LAYERS + 40)) + 5 * HIDDEN
    critic = 2 * (2 * (LAYERS + 4) + 9 * (LAYERS + 40)) + 5 * HIDDEN
    assert roofline.update(SHAPE, [GROUP], steps=2) == Work(3 * FORWARD, 4 * actor)
    assert roofline.update(SHAPE, [GROUP], steps=2, role="critic") == Work(3 * CRITICS_FORWARD, 4 * critic)


def test_generation_is_counted_by_hand() -> None:
    # Three passes, the first over the prompt; 8 numbers of keys and values at each of 5 positions written and 7 read.
    numbers = 3 * (LAYERS + 40) + 2 * 3 * 4 * 3 + 8 * (5 + 7)
    assert roofline.generation(SHAPE, [GROUP]) == Work(FORWARD, 4 * numbers)
    # A shorter row in the same batch adds its computation, but no reads of the weights.
    both = roofline.generation(SHAPE, [GROUP, Group(prompt=1, responses=[2])])
    # Its prompt token and one more: hidden states of one token, 2 positions written, 1 read.
    assert both.bytes == 4 * (numbers + 2 * 3 * 4 + 8 * 3)


def test_half_precision_halves_bytes_of_passes_only() -> None:
    weights = LAYERS + 40
    assert roofline.evaluation(SHAPE, [GROUP], number=2).bytes == 2 * (weights + 2 * HIDDEN)
    assert roofline.generation(SHAPE, [GROUP], number=2).bytes == roofline.generation(SHAPE, [GROUP]).bytes / 2
    half = roofline.update(SHAPE, [GROUP], steps=2, number=2)
    # No pass reads float32 weights; gradients, moments and the weights of the optimizer step stay float32.
    assert half == Work(3 * FORWARD, 2 * (2 * 2 * weights + 5 * HIDDEN) + 4 * 2 * 9 * weights)


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    shape = workload.Shape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64, vocab_size=112)
    make_tiny_model(tmp_path, **asdict(shape))
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, dtype=torch.float32, attn_implementation="eager")
    prompt, response = 20, 13
    ids = torch.randint(3, 112, (1, prompt + response - 1))
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        model.lm_head(hidden[:, prompt - 1 :]).sum().backward()
    group = Group(prompt, [response])
    unseen = 4 * shape.layers * shape.hidden * (ids.numel() ** 2 - group.pairs())  # eager attention masks them
    counted = roofline.update(shape, [group], steps=1).operations
    assert counter.get_total_flops() == counted + 3 * unseen


def test_rows_of_a_prompt_are_a_group() -> None:
    prompts = [5] * workload.SAMPLES + [7] * workload.SAMPLES
    assert roofline.groups_of(prompts, list(range(1, 17))) == [
        Group(5, list(range(1, 9))),
        Group(7, list(range(9, 17))),
    ]


def test_a_step_is_its_generation_its_passes_and_its_updates() -> None:
    lengths = [[1 + row % 9 for row in range(workload.PROMPTS * workload.SAMPLES)], [4] * 128]
    forward, critics = 0.0, 0.0
    for number, responses in enumerate(lengths, start=1):
        prompts = [len(text) for text in workload.prompt_texts(number) for _ in range(workload.SAMPLES)]
        groups = roofline.groups_of(prompts, responses)
        forward += roofline.evaluation(SHAPE, groups).operations / 2
        critics += roofline.evaluation(SHAPE, groups, "critic").operations / 2
    # Generation and old log-probs take a forward pass each, an update three; so do the reference and the critic.
    assert ppo_step.work_of(SHAPE, lengths, critic=False).operations == pytest.approx(5 * forward)
    assert ppo_step.work_of(SHAPE, lengths, critic=True).operations == pytest.approx(6 * forward + 4 * critics)


def test_smaller_mini_batches_read_and_write_the_weights_more_often() -> None:
    rows = workload.training_rows(512, seed=1)
    case = {"model": "1M", "role": "actor"}
    two, eight = (train_step.work_of({**case, "mini_batch": rows}, rows_) for rows, rows_ in ((64, rows), (16, rows)))
    weights = workload.SHAPES["1M"].weights_of_layers() + 128 * 512
    assert two == train_step.work_of(case, rows)
    assert eight.operations == two.operations
    assert eight.bytes - two.bytes == 4 * 6 * 11 * weights


@pytest.mark.parametrize(("work", "bound"), [(Work(30e9, 1e9), "operations"), (Work(1e9, 30e9), "bytes")])
def test_a_result_line_has_both_shares_and_the_bound(work: Work, bound: str) -> None:
    line = roofline.reached(work, 2.0, Rates(threads=1, matmul=60e9, copy=20e9))
    assert line["of_matmul_rate"] == pytest.approx(work.operations / 120e9)
    assert line["of_copy_rate"] == pytest.approx(work.bytes / 40e9)
    assert line["bound"] == bound
    cells = [form.format(**line) for form in roofline.COLUMNS.values()]
    assert cells == (["30.0, 25%", "1.00, 2%"] if bound == "operations" else ["1.0, 1%", "30.00, 75%"]) + [bound]
    assert "on 1 core 60 GFLOP/s and 20.0 GB/s" in roofline.sentence([line, line])


def test_rates_are_measured_on_the_threads_that_are_named() -> None:
    before = torch.get_num_threads()
    try:
        rates = roofline.measured_rates(threads=2, seconds=0.02)
        assert torch.get_num_threads() == rates.threads == 2
    finally:
        torch.set_num_threads(before)
    assert 1e8 < rates.matmul < 1e14
    assert 1e7 < rates.copy < 1e12


@pytest.mark.slow
def test_the_rate_of_products_is_that_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = []
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: multiplied.append(out.dtype) or original(a, b, out=out))
    roofline.measured_rates(threads=torch.get_num_threads(), seconds=0.001, dtype=torch.bfloat16)
    assert set(multiplied) == {torch.bfloat16}
