"""Packed rows, compared with transformers' classes on each row separately."""

from functools import cache
from typing import Any

import pytest
import torch
from support.tiny import LINEAR, predicted_tokens, tiny_folder, tiny_rows
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from camshaft.config.engine import EngineModel
from camshaft.config.families import support
from camshaft.errors import EngineError
from camshaft.models.attention import PACKED
from camshaft.models.loader import load_model
from camshaft.models.packed import Head, PackedModel
from camshaft.models.packing import Packing

LENGTHS = [7, 1, 12, 3]
# A wide initialization, so that a wrong mask, boundary or factor changes log-probs far more than rounding does.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_embeddings": False},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
    "minicpm3": {
        "dim_model_base": 8,
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "phi": {"tie_embeddings": False},  # its output head has a bias
}


def folder_of(family: str) -> str:
    return str(tiny_folder(family, hidden=32, initializer_range=0.1, **FAMILIES[family]))


@cache
def packed(family: str = "qwen2", head: Head = "causal_lm", dtype: str = "float64") -> PackedModel:
    return load_model(EngineModel(path=folder_of(family), head=head), dtype, "cpu", seed=0)


def inputs() -> tuple[Tensor, Packing, Tensor]:
    return torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS)


def by_transformers(model: PreTrainedModel, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of all tokens but the first of each row, one row at a time, from full logits."""
    log_probs, entropies = [], []
    for row in tiny_rows(LENGTHS):
        log_p = torch.log_softmax(model(row[None]).logits[0, :-1] / temperature, dim=-1)
        log_probs.append(log_p.gather(1, row[1:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(dim=-1))
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_match_transformers_on_each_row(family: str):
    model = packed(family)
    hf_model = AutoModelForCausalLM.from_pretrained(
        folder_of(family), dtype="float64", attn_implementation="eager", experts_implementation="eager"
    )
    actual = model(*inputs(), ("log_probs", "entropy"), temperature=0.7)
    log_probs, entropies = by_transformers(hf_model, 0.7)
    assert log_probs.std() > 0.05
    torch.testing.assert_close(actual["log_probs"], log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual["entropy"], entropies, rtol=0, atol=1e-6)
    weights = torch.randn(len(log_probs), dtype=log_probs.dtype, generator=torch.Generator().manual_seed(0))
    grads = gradients(model.hf, (actual["log_probs"] * weights + 0.1 * actual["entropy"]).mean())
    expected_grads = gradients(hf_model, (log_probs * weights + 0.1 * entropies).mean())
    assert grads.keys() == expected_grads.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(
            gradient, expected_grads[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_sampling_routers_choose_in_training_as_in_generation():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 1.0}
    folder = tiny_folder("phimoe", hidden=32, initializer_range=0.1, **sizes)
    model = load_model(EngineModel(path=str(folder)), "float64", "cpu", seed=0).train()
    assert model.hf.training
    hf_model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float64", attn_implementation="eager", experts_implementation="eager"
    )
    actual, expected = model(*inputs(), ("log_probs",))["log_probs"], by_transformers(hf_model, 1.0)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    expected_grads = gradients(hf_model, expected.mean())
    for name, gradient in gradients(model.hf, actual.mean()).items():
        torch.testing.assert_close(gradient, expected_grads[name], rtol=1e-5, atol=1e-6)
    hf_model.train()
    assert (by_transformers(hf_model, 1.0)[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen2", "granite", "cohere", "phi"])
def test_divergence_and_its_gradient_match_full_logits(family: str):
    model = packed(family)
    hf_model = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype="float64", attn_implementation="eager")
    tokens, packing, at = inputs()
    random = torch.Generator().manual_seed(0)
    log_q = torch.randn(len(tokens), hf_model.config.vocab_size, dtype=torch.float64, generator=random).log_softmax(
        dim=-1
    )
    divergence = model(tokens, packing, at, ("full_kl",), 0.7, log_q)["full_kl"]
    log_p = torch.cat([(hf_model(row[None]).logits[0, :-1] / 0.7).log_softmax(dim=-1) for row in tiny_rows(LENGTHS)])
    expected = (log_p.exp() * (log_p - log_q[at])).sum(dim=-1)
    torch.testing.assert_close(divergence, expected, rtol=0, atol=1e-6)
    grads, expected_grads = gradients(model.hf, divergence.sum()), gradients(hf_model, expected.sum())
    assert grads.keys() == expected_grads.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected_grads[name], rtol=1e-5, atol=1e-5)


def test_float32_agrees_to_a_millionth():
    folder = tiny_folder(hidden=32)
    model = load_model(EngineModel(path=str(folder)), "float32", "cpu", 0)
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actual = model(*inputs(), ("log_probs",))["log_probs"]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, by_transformers(hf_model, 1.0)[0], rtol=0, atol=1e-6)


def test_bfloat16_gives_float32_close_to_float32():
    exact = packed(dtype="float32")(*inputs(), ("log_probs",))["log_probs"]
    rough = packed(dtype="bfloat16")(*inputs(), ("log_probs",))["log_probs"]
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.1


def test_a_row_does_not_see_its_neighbours():
    tokens, packing, at = inputs()
    model = packed()
    before = model(tokens, packing, at, ("log_probs",))["log_probs"]
    tokens[: LENGTHS[0]] = 5
    after = model(tokens, packing, at, ("log_probs",))["log_probs"]
    assert not torch.equal(before[:6], after[:6])
    assert torch.equal(before[6:], after[6:])


def test_only_requested_tokens_are_returned_in_order():
    tokens, packing, at = inputs()
    some = at[torch.tensor([9, 2, 5])]
    everything = packed()(tokens, packing, at, ("log_probs",))["log_probs"]
    few = packed()(tokens, packing, some, ("log_probs",))["log_probs"]
    torch.testing.assert_close(few, everything[torch.tensor([9, 2, 5])])


def test_asking_for_no_token_leaves_a_gradient_of_zeros():
    model = packed()
    tokens, packing, at = inputs()
    out = model(tokens, packing, at[:0], ("log_probs", "entropy"))
    assert out["log_probs"].shape == (0,)
    grads = gradients(model.hf, out["log_probs"].sum() + out["entropy"].sum())
    assert grads
    assert all(not gradient.any() for gradient in grads.values())


def test_entropy_without_log_probs_and_order_of_outputs():
    out = packed()(*inputs(), ("entropy",))
    assert list(out) == ["entropy"]
    assert list(packed()(*inputs(), ("entropy", "log_probs"))) == ["entropy", "log_probs"]


def test_values_match_the_token_classification_model(tmp_path):
    model = packed(head="value")
    model.hf.save_pretrained(tmp_path)
    hf_model = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    expected = [hf_model(row[None]).logits[0, :-1, 0] for row in tiny_rows(LENGTHS)]
    actual = model(*inputs(), ("values",))["values"]
    torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=1e-6)
    assert actual.std() > 0.1


def test_value_heads_have_no_dropout_in_train_mode():
    model = packed(head="value")
    calm = model(*inputs(), ("values",))["values"]
    model.train()
    trained = model(*inputs(), ("values",))["values"]
    model.eval()
    assert torch.equal(calm, trained)


def test_scores_match_the_sequence_classification_model(tmp_path):
    model = load_model(EngineModel(path=folder_of("llama"), head="reward", random_init=True), "float64", "cpu", 0)
    model.hf.save_pretrained(tmp_path)
    hf_model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    expected = torch.cat([hf_model(row[None]).logits[0] for row in tiny_rows(LENGTHS)])
    actual = model(*inputs(), ("scores",))["scores"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert actual.shape == (len(LENGTHS),)


def test_half_precision_models_return_full_precision_scores():
    model = load_model(EngineModel(path=folder_of("llama"), head="reward", random_init=True), "bfloat16", "cpu", 0)
    scores = model(*inputs(), ("scores",))["scores"]
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())


@pytest.mark.parametrize("family", ["qwen2", "mistral", "mixtral"])
def test_gradient_checkpointing_changes_nothing(family: str):
    results = []
    for checkpointing in (False, True):
        described = EngineModel(path=folder_of(family), enable_gradient_checkpointing=checkpointing)
        model = load_model(described, "float32", "cpu", 0).train()
        assert model.hf.is_gradient_checkpointing is checkpointing
        log_probs = model(*inputs(), ("log_probs",))["log_probs"]
        results.append((log_probs, gradients(model.hf, log_probs.mean())))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


def test_gradient_checkpointing_computes_layers_again():
    described = EngineModel(path=folder_of("qwen2"), enable_gradient_checkpointing=True)
    model = load_model(described, "float32", "cpu", 0).train()
    calls = []
    model.hf.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model(*inputs(), ("log_probs",))["log_probs"].sum().backward()
    assert len(calls) == 2


def test_dropout_of_the_config_acts_in_train_mode_only():
    described = EngineModel(path=folder_of("qwen2"), override_config={"attention_dropout": 0.5})
    model = load_model(described, "float32", "cpu", 0)
    calm = model(*inputs(), ("log_probs",))["log_probs"]
    assert torch.equal(calm, model(*inputs(), ("log_probs",))["log_probs"])
    assert not torch.equal(calm, model.train()(*inputs(), ("log_probs",))["log_probs"])


@pytest.mark.parametrize(
    ("head", "outputs"),
    [("causal_lm", ("values",)), ("value", ("log_probs",)), ("value", ("scores",)), ("causal_lm", ())],
)
def test_outputs_of_another_head_are_an_error(head: Head, outputs: tuple[str, ...]):
    with pytest.raises(EngineError, match=f"a model with head={head} supports the outputs"):
        packed(head=head)(*inputs(), outputs)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ([7], "7, the first token of a row"),
        ([0], "0, the first token of a row"),
        ([23], r"must hold offsets in 0..22, got values in 23..23"),
        ([-1, 2], r"must hold offsets in 0..22, got values in -1..2"),
    ],
)
def test_predicting_a_first_token_is_an_error(at: list[int], message: str):
    tokens, packing, _ = inputs()
    with pytest.raises(EngineError, match=message):
        packed()(tokens, packing, torch.tensor(at), ("log_probs",))


def test_misshapen_inputs_are_an_error():
    tokens, packing, at = inputs()
    with pytest.raises(EngineError, match=r"tokens of shape \(23,\) do not match a packing of 24 tokens"):
        packed()(tokens, Packing([*LENGTHS, 1]), at, ("log_probs",))
    with pytest.raises(EngineError, match=r"`at` must be int64 .* got torch.bool"):
        packed()(tokens, packing, torch.ones(23, dtype=torch.bool), ("log_probs",))
    with pytest.raises(EngineError, match="at least one token"):
        packed()(tokens, Packing([*LENGTHS, 0]), at, ("log_probs",))
    for log_q, shape in ((None, "None"), (torch.zeros(23, 5), r"\(23, 5\)")):
        with pytest.raises(EngineError, match=rf"`log_q` of shape \(23, 112\) \(tokens, vocabulary\), got {shape}"):
            packed()(tokens, packing, at, ("full_kl",), log_q=log_q)


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("hyperclovax", {"logits_scaling": 2.0}, "logits_scaling=2.0"),
        ("bert", {"is_decoder": True}, "does not pass the hidden states"),
    ],
)
def test_unsupported_models_are_rejected(family: str, extra: dict[str, Any], message: str):
    folder = tiny_folder(family, hidden=32, intermediate=32, **extra)
    with pytest.raises(EngineError, match=message):
        load_model(EngineModel(path=str(folder)), "float32", "cpu", 0)


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("mpt", {}, "does not use the attention interface"),
        ("falcon", {}, "do not use the attention interface"),
        ("mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}, "has a recurrent state"),
    ],
)
def test_models_of_unknown_types_are_checked_when_they_are_built(
    family: str, extra: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RECURRENT", "OWN_ATTENTION"):
        monkeypatch.setattr(support, name, ())
    folder = tiny_folder(family, hidden=32, intermediate=32, **extra)
    with pytest.raises(EngineError, match=message):
        load_model(EngineModel(path=str(folder)), "float32", "cpu", 0)


def test_a_model_that_drops_packing_arguments_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "DROPS_ARGUMENTS", ())  # a model of a third party is not in the list
    model = load_model(EngineModel(path=str(tiny_folder("nemotron", hidden=32))), "float32", "cpu", 0)
    with pytest.raises(EngineError, match="this model drops the arguments"):
        model(*inputs(), ("log_probs",))


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 10,
            },
            "original_max_position_embeddings",
        ),
    ],
)
def test_rows_that_change_the_rotary_frequencies_of_other_rows_are_an_error(rope: dict[str, Any], key: str):
    positions = 10 if rope["rope_type"] == "dynamic" else 40
    config = {"rope_parameters": {**rope, "rope_theta": 1e4}, "max_position_embeddings": positions}
    folder = tiny_folder("llama", hidden=32)
    model = load_model(EngineModel(path=str(folder), override_config=config), "float32", "cpu", 0)
    model(torch.cat(tiny_rows([10, 3])), Packing([10, 3]), torch.tensor([1]), ("log_probs",))
    with pytest.raises(EngineError, match=f"a row of 12 tokens is longer than {key}=10"):
        model(*inputs(), ("log_probs",))


def test_a_model_with_another_attention_implementation_is_rejected():
    hf_model = AutoModelForCausalLM.from_pretrained(folder_of("qwen2"), attn_implementation="sdpa")
    with pytest.raises(EngineError, match=f"built with attn_implementation='sdpa'; build it with '{PACKED}'"):
        PackedModel(hf_model, "causal_lm")


def test_a_head_that_does_not_fit_is_rejected():
    causal = AutoModelForCausalLM.from_pretrained(folder_of("qwen2"), attn_implementation=PACKED)
    with pytest.raises(EngineError, match="no layer named 'score' or 'classifier'"):
        PackedModel(causal, "value")
    three = AutoModelForTokenClassification.from_pretrained(
        folder_of("qwen2"), attn_implementation=PACKED, num_labels=3
    )
    with pytest.raises(EngineError, match="has 3; load the model with num_labels=1"):
        PackedModel(three, "value")
    with pytest.raises(EngineError, match="no output layer to the vocabulary"):
        PackedModel(three, "causal_lm")


def test_a_replaced_output_head_is_an_error_and_not_ignored():
    model = load_model(EngineModel(path=folder_of("llama")), "float32", "cpu", 0)
    output: Any = model.hf.get_output_embeddings()
    model.hf.set_output_embeddings(torch.nn.Sequential(output))
    with pytest.raises(EngineError, match=r"is a Sequential, not an nn\.Linear"):
        model(*inputs(), ("log_probs",))
