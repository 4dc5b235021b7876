"""The fused output head, compared with the formula on full logits in float64."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_warm_ranks, world_group
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from camshaft.errors import EngineError
from camshaft.models.linear_logprob import Tile, VocabularyShard, linear_full_kl, linear_logprob, log_distribution

M, H, V = 37, 8, 29


def naive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of the targets, the entropy and the sum of squared probabilities."""
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    return log_probs, -(log_p.exp() * log_p).sum(dim=-1), log_p.exp().square().sum(dim=-1)


def inputs(dtype: torch.dtype = torch.float64, rows: int = M) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, H), (V, H), (V,))
    hidden, weight, bias = (torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    return hidden, weight, bias, torch.randint(0, V, (rows,), generator=generator)


def test_three_tokens_by_hand():
    # logits [0, ln 2, ln 5] give p = 1/8, 2/8, 5/8; at temperature 1/2 they give 1/30, 4/30, 25/30.
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    hidden, targets = torch.ones(3, 1), torch.tensor([0, 1, 2])
    outputs: Any = linear_logprob(hidden, weight, targets, outputs=("entropy", "sum_pi_squared"))
    log_probs, entropy, squares = outputs
    assert torch.allclose(log_probs.exp(), torch.tensor([1 / 8, 2 / 8, 5 / 8]))
    assert torch.allclose(squares, torch.tensor(30 / 64).expand(3))
    assert torch.allclose(entropy, torch.tensor(0.9003).expand(3), atol=1e-4)  # (ln 8 + 2 ln 4 + 5 ln 1.6) / 8
    log_probs, *_ = linear_logprob(hidden, weight, targets, temperature=0.5)
    assert torch.allclose(log_probs.exp(), torch.tensor([1 / 30, 4 / 30, 25 / 30]))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", [(2, 3), (5, V), (M, 7), (10, 10), (1000, 1000)])
def test_values_and_gradients_match_the_formula(temperature: float, with_bias: bool, tile: tuple[int, int]):
    hidden, weight, bias, targets = inputs()
    used = bias if with_bias else None
    both = ("entropy", "sum_pi_squared")
    fused: Any = linear_logprob(hidden, weight, targets, used, temperature, both, tile=Tile(*tile))
    reference = naive(hidden, weight, used, targets, temperature)
    mixture = torch.randn(2, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    for actual, expected in zip(fused, reference, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=1e-12)
    assert not fused.sum_pi_squared.requires_grad
    (alone,) = linear_logprob(
        hidden, weight, targets, used, temperature, outputs=("sum_pi_squared",), tile=Tile(*tile)
    )[2:]
    torch.testing.assert_close(alone, fused.sum_pi_squared)
    actual = torch.autograd.grad((fused[0] * mixture[0] + fused[1] * mixture[1]).sum(), leaves)
    expected = torch.autograd.grad((reference[0] * mixture[0] + reference[1] * mixture[1]).sum(), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_tiles_of_a_single_logit_match_the_formula():
    test_values_and_gradients_match_the_formula(0.6, True, (1, 1))
    test_divergence_and_gradients_match_the_formula(0.6, True, (1, 1))


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_a_single_output(which: int):
    hidden, weight, bias, targets = inputs()
    outputs: Any = linear_logprob(hidden, weight, targets, bias, 0.7, ("entropy",))
    gradients = torch.autograd.grad(outputs[which].sum(), [hidden, weight, bias])
    expected = torch.autograd.grad(naive(hidden, weight, bias, targets, 0.7)[which].sum(), [hidden, weight, bias])
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_gradcheck_in_float64():
    hidden, weight, bias, targets = inputs(rows=4)

    def outputs(h: Tensor, w: Tensor, b: Tensor) -> Any:
        return linear_logprob(h, w, targets, b, temperature=0.8, outputs=("entropy",), tile=Tile(3, 11))[:2]

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


def test_skipping_entropy_keeps_log_probs_bitwise():
    hidden, weight, _, targets = inputs(torch.float32)
    alone, *nothing = linear_logprob(hidden, weight, targets)
    both, *_ = linear_logprob(hidden, weight, targets, outputs=("entropy", "sum_pi_squared"))
    assert nothing == [None, None]
    assert torch.equal(alone, both)


def test_outputs_are_not_views():
    hidden, weight, bias, targets = inputs()
    outputs = linear_logprob(hidden, weight, targets, bias, outputs=("entropy", "sum_pi_squared"))
    log_q = torch.randn(M, V, dtype=torch.float64).log_softmax(dim=1)
    divergence = linear_full_kl(hidden, weight, log_q, torch.arange(M), bias, 1.0)
    assert all(tensor is not None and tensor._base is None for tensor in (*outputs, divergence))


def test_gradients_are_computed_only_where_required():
    hidden, weight, _, targets = inputs()
    linear_logprob(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None
    only_weight = torch.autograd.grad(linear_logprob(hidden.detach(), weight, targets)[0].sum(), weight)[0]
    expected = torch.autograd.grad(naive(hidden.detach(), weight, None, targets, 1.0)[0].sum(), weight)[0]
    torch.testing.assert_close(only_weight, expected)


def test_half_precision_inputs_give_float32_results_summed_in_float32():
    hidden, weight, _, targets = inputs(torch.bfloat16, rows=2000)
    log_probs, entropy, _ = linear_logprob(hidden, weight, targets, outputs=("entropy",), tile=Tile(16, 10))
    exact = naive(hidden.double(), weight.double(), None, targets, 1.0)
    assert entropy is not None
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), exact[0], rtol=0, atol=0.06)  # logits up to 10, bf16 has 3 digits
    gradient = torch.autograd.grad(log_probs.sum(), weight)[0]
    expected = torch.autograd.grad(exact[0].sum(), weight)[0]
    # The sum of 125 tiles in bfloat16 would be off by several per cent.
    assert gradient.dtype == torch.bfloat16
    assert (gradient.double() - expected.double()).norm() < 0.005 * expected.double().norm()


def test_no_tokens_give_no_numbers_and_zero_gradients():
    hidden, weight, _, targets = inputs(rows=0)
    log_probs, entropy, _ = linear_logprob(hidden, weight, targets, outputs=("entropy",))
    assert entropy is not None
    assert log_probs.shape == entropy.shape == (0,)
    gradients = torch.autograd.grad(log_probs.sum() + entropy.sum(), [hidden, weight])
    assert gradients[0].shape == (0, H)
    assert torch.equal(gradients[1], torch.zeros(V, H, dtype=torch.float64))


class Largest(TorchDispatchMode):
    """Record the number of entries of the largest new tensor, optionally of one dtype."""

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__()
        self.dtype, self.entries = dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments, outputs = ([one for one in tree_leaves(tree) if isinstance(one, Tensor)] for tree in (args, result))
        storages = {one.untyped_storage().data_ptr() for one in arguments}
        new = [one for one in outputs if one.untyped_storage().data_ptr() not in storages]  # other results are views
        self.entries = max([self.entries, *(one.numel() for one in new if self.dtype in (None, one.dtype))])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_tile_of_logits(dtype: torch.dtype):
    rows, wide, vocabulary, tile = 96, 2, 500, Tile(32, 100)
    hidden, weight = (
        torch.randn(rows, wide).to(dtype).requires_grad_(),
        torch.randn(vocabulary, wide).to(dtype).requires_grad_(),
    )
    targets = torch.randint(0, vocabulary, (rows,))
    with Largest() as largest:
        log_probs, entropy, _ = linear_logprob(hidden, weight, targets, None, 0.9, ("entropy", "sum_pi_squared"), tile)
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.entries == tile.tokens * tile.vocabulary
    with Largest() as largest:
        naive(hidden, weight, None, targets, 0.9)[0].sum().backward()
    assert largest.entries == rows * vocabulary  # the counter detects full logits where they exist


def test_gradient_of_a_half_precision_weight_accumulates_in_float32():
    rows, wide, vocabulary, tile = 96, 50, 500, Tile(32, 100)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(count, wide, generator=generator).bfloat16().requires_grad_() for count in (rows, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    with Largest(torch.float32) as largest:
        linear_logprob(hidden, weight, targets, tile=tile)[0].sum().backward()
    assert largest.entries == tile.vocabulary * wide < weight.numel()
    wider = weight.detach().double().requires_grad_()
    naive(hidden.detach().double(), wider, None, targets, 1.0)[0].sum().backward()
    assert weight.grad is not None
    assert wider.grad is not None
    # Rounded once at the end; CPU logits are the rounded product.
    assert float((weight.grad - wider.grad).norm() / wider.grad.norm()) < 1e-2


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_an_error(temperature: float):
    hidden, weight, _, targets = inputs()
    with pytest.raises(EngineError, match=r"temperature=.* is not above 0"):
        linear_logprob(hidden, weight, targets, temperature=temperature)


def test_second_derivatives_are_rejected_and_not_silently_wrong():
    hidden, weight, _, targets = inputs()
    squares = linear_logprob(hidden, weight, targets)[0].square().sum()
    gradient = torch.autograd.grad(squares, hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# -- the divergence over the whole vocabulary ------------------------------------------------------


def naive_kl(hidden: Tensor, weight: Tensor, bias: Tensor | None, log_q: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


def others(rows: int = M) -> tuple[Tensor, Tensor]:
    """Return distributions for more tokens than requested, and the indices of the `rows` tokens in them."""
    generator = torch.Generator().manual_seed(2)
    log_q = (3 * torch.randn(rows + 9, V, generator=generator, dtype=torch.float64)).log_softmax(dim=-1)
    return log_q, torch.randperm(rows + 9, generator=generator)[:rows]


def test_divergence_of_one_token_by_hand():
    # p = 1/8, 2/8, 5/8 and q = 1/4, 1/4, 1/2: the divergence is 1/8 ln(1/2) + 5/8 ln(5/4), and its derivative by
    # a logit p (ln(p / q) - divergence). The hidden state is 1, so the weights are the logits.
    weight = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log().requires_grad_()
    log_q = torch.tensor([[9.0, 9.0, 9.0], [0.25, 0.25, 0.5]], dtype=torch.float64).log()
    divergence = linear_full_kl(torch.ones(1, 1, dtype=torch.float64), weight, log_q, torch.tensor([1]))
    by_hand = math.log(1 / 2) / 8 + math.log(5 / 4) * 5 / 8
    assert divergence.tolist() == pytest.approx([by_hand], abs=1e-14)
    (gradient,) = torch.autograd.grad(divergence, weight)
    slopes = [(math.log(1 / 2) - by_hand) / 8, (0 - by_hand) / 4, (math.log(5 / 4) - by_hand) * 5 / 8]
    assert gradient[:, 0].tolist() == pytest.approx(slopes, abs=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", [(2, 3), (5, V), (10, 10), (1000, 1000)])
def test_divergence_and_gradients_match_the_formula(temperature: float, with_bias: bool, tile: tuple[int, int]):
    hidden, weight, bias, _ = inputs()
    log_q, rows = others()
    used = bias if with_bias else None
    divergence = linear_full_kl(hidden, weight, log_q, rows, used, temperature, tile=Tile(*tile))
    reference = naive_kl(hidden, weight, used, log_q[rows], temperature)
    torch.testing.assert_close(divergence, reference, rtol=1e-12, atol=1e-12)
    mixture = torch.randn(M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    gradients = torch.autograd.grad((divergence * mixture).sum(), leaves)
    torch.testing.assert_close(
        gradients, torch.autograd.grad((reference * mixture).sum(), leaves), rtol=1e-11, atol=1e-11
    )


def test_divergence_from_itself_is_zero_and_so_is_its_gradient():
    hidden, weight, bias, _ = inputs()
    log_q = log_distribution(hidden, weight, bias, 0.7)
    divergence = linear_full_kl(hidden, weight, log_q, torch.arange(M), bias, 0.7)
    torch.testing.assert_close(divergence, torch.zeros_like(divergence), rtol=0, atol=1e-14)
    for gradient in torch.autograd.grad(divergence.sum(), [hidden, weight, bias]):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_divergence_of_half_precision_inputs_is_summed_in_float32():
    hidden, weight, _, _ = inputs(torch.bfloat16, rows=2000)
    log_q, rows = others(2000)
    divergence = linear_full_kl(hidden, weight, log_q.float(), rows, tile=Tile(16, 10))
    exact = naive_kl(hidden.double(), weight.double(), None, log_q[rows], 1.0)
    assert divergence.dtype == torch.float32
    torch.testing.assert_close(divergence.double(), exact, rtol=0, atol=0.1)  # logits up to 10, bf16 has 3 digits
    gradient = torch.autograd.grad(divergence.sum(), weight)[0]
    expected = torch.autograd.grad(exact.sum(), weight)[0]
    assert gradient.dtype == torch.bfloat16
    assert (gradient.double() - expected.double()).norm() < 0.005 * expected.double().norm()


def test_divergence_makes_no_tensor_larger_than_a_tile_of_logits():
    rows, wide, vocabulary, tile = 96, 2, 500, Tile(32, 100)
    hidden, weight = torch.randn(rows, wide, requires_grad=True), torch.randn(vocabulary, wide, requires_grad=True)
    log_q = torch.randn(rows, vocabulary).log_softmax(dim=-1)
    with Largest() as largest:
        linear_full_kl(hidden, weight, log_q, torch.arange(rows), None, 0.9, tile).sum().backward()
    assert largest.entries == tile.tokens * tile.vocabulary


# -- soft-capped logits ----------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(5, V), (10, 10)])
def test_soft_capped_log_probs_and_gradients_match_the_formula(tile: tuple[int, int]):
    hidden, weight, bias, targets = inputs()
    both = ("entropy", "sum_pi_squared")
    fused: Any = linear_logprob(hidden, weight, targets, bias, 0.7, both, tile=Tile(*tile), softcap=2.0)
    reference = naive(hidden, weight, bias, targets, 0.7, softcap=2.0)
    for actual, expected in zip(fused, reference, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-12, atol=1e-12)
    mixture = torch.randn(2, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients, expected = (
        torch.autograd.grad((out[0] * mixture[0] + out[1] * mixture[1]).sum(), [hidden, weight, bias])
        for out in (fused, reference)
    )
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-11)


def test_soft_capped_divergence_and_gradients_match_the_formula():
    hidden, weight, bias, _ = inputs()
    log_q, rows = others()
    logits = 2 * torch.tanh((hidden @ weight.t() + bias) / 2)
    log_p = torch.log_softmax(logits / 0.7, dim=-1)
    reference = (log_p.exp() * (log_p - log_q[rows])).sum(dim=-1)
    divergence = linear_full_kl(hidden, weight, log_q, rows, bias, 0.7, tile=Tile(10, 10), softcap=2.0)
    torch.testing.assert_close(divergence, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_distribution(hidden, weight, bias, 0.7, softcap=2.0), log_p.detach())
    gradients, expected = (torch.autograd.grad(out.sum(), [hidden, weight, bias]) for out in (divergence, reference))
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-11)


# -- vocabulary sharded over ranks -----------------------------------------------------------------


def by_parts(starts: list[int], with_bias: bool, rows: int, factor: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the gradients of the hidden states and of this rank's rows of weight and bias."""
    hidden, weight, bias, targets = inputs(rows=rows)
    rank = dist.get_rank()
    shard = slice(starts[rank], starts[rank + 1])
    leaves = [(weight * factor)[shard].detach().requires_grad_(), bias[shard].detach().requires_grad_()][
        : 1 + with_bias
    ]
    vocabulary_shard = VocabularyShard(world_group(), shard.start)
    used = leaves[1] if with_bias else None
    outputs: Any = linear_logprob(
        hidden, leaves[0], targets, used, 0.7, ("entropy", "sum_pi_squared"), Tile(5, 6), vocabulary_shard
    )
    mixture = torch.randn(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((outputs[0] * mixture[0] + outputs[1] * mixture[1]).sum(), [hidden, *leaves])
    return [tensor.detach() for tensor in outputs], list(gradients)


@pytest.mark.parametrize("starts", [[0, 15, V], [0, 10, 20, V], [0, 28, V]])
@pytest.mark.parametrize(("with_bias", "factor"), [(False, 1.0), (True, 1.0), (False, 200.0)])
def test_vocabulary_shards_add_up_to_the_formula(starts: list[int], with_bias: bool, factor: float):
    # With factor 200 logits differ by thousands, so that some shards of the vocabulary have zero probability.
    hidden, weight, bias, targets = inputs()
    large = (weight * factor).detach().requires_grad_()
    leaves = [hidden, large, bias][: 2 + with_bias]
    reference = naive(hidden, large, bias if with_bias else None, targets, 0.7)
    mixture = torch.randn(2, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((reference[0] * mixture[0] + reference[1] * mixture[1]).sum(), leaves)
    for rank, (outputs, gradients) in enumerate(
        run_warm_ranks(by_parts, len(starts) - 1, starts, with_bias, M, factor)
    ):
        torch.testing.assert_close(outputs, [tensor.detach() for tensor in reference], rtol=1e-11, atol=1e-11)
        shard = slice(starts[rank], starts[rank + 1])
        torch.testing.assert_close(gradients[0], expected[0], rtol=1e-9, atol=1e-9)
        for gradient, full in zip(gradients[1:], expected[1:], strict=True):
            torch.testing.assert_close(gradient, full[shard], rtol=1e-9, atol=1e-9)


def divergence_by_parts(starts: list[int], rows: int, factor: float) -> tuple[Tensor, list[Tensor]]:
    """Return the divergence, and its gradients as in `by_parts`."""
    hidden, weight, bias, _ = inputs(rows=rows)
    log_q, picked = others(rows)
    rank = dist.get_rank()
    shard = slice(starts[rank], starts[rank + 1])
    leaves = [(weight * factor)[shard].detach().requires_grad_(), bias[shard].detach().requires_grad_()]
    vocabulary_shard = VocabularyShard(world_group(), shard.start)
    divergence = linear_full_kl(
        hidden, leaves[0], log_q, picked, leaves[1], 0.7, tile=Tile(5, 6), shard=vocabulary_shard
    )
    mixture = torch.randn(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return divergence.detach(), list(torch.autograd.grad((divergence * mixture).sum(), [hidden, *leaves]))


@pytest.mark.parametrize(("starts", "factor"), [([0, 15, V], 1.0), ([0, 10, 28, V], 1.0), ([0, 15, V], 200.0)])
def test_divergences_over_parts_of_the_vocabulary_add_up(starts: list[int], factor: float):
    hidden, weight, bias, _ = inputs()
    log_q, picked = others()
    large = (weight * factor).detach().requires_grad_()
    reference = naive_kl(hidden, large, bias, log_q[picked], 0.7)
    mixture = torch.randn(M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((reference * mixture).sum(), [hidden, large, bias])
    for rank, (divergence, gradients) in enumerate(
        run_warm_ranks(divergence_by_parts, len(starts) - 1, starts, M, factor)
    ):
        torch.testing.assert_close(divergence, reference.detach(), rtol=1e-11, atol=1e-11)
        shard = slice(starts[rank], starts[rank + 1])
        torch.testing.assert_close(gradients[0], expected[0], rtol=1e-9, atol=1e-9)
        for gradient, full in zip(gradients[1:], expected[1:], strict=True):
            torch.testing.assert_close(gradient, full[shard], rtol=1e-9, atol=1e-9)


def distribution_by_parts(starts: list[int], rows: int) -> Tensor:
    hidden, weight, bias, _ = inputs(rows=rows)
    shard = slice(starts[dist.get_rank()], starts[dist.get_rank() + 1])
    return log_distribution(hidden, weight[shard], bias[shard], 0.7, VocabularyShard(world_group(), shard.start))


@pytest.mark.parametrize("rows", [0, M])
def test_every_rank_has_the_distribution_over_the_whole_vocabulary(rows: int):
    hidden, weight, bias, _ = inputs(rows=rows)
    expected = ((hidden @ weight.t() + bias) / 0.7).log_softmax(dim=1).detach()
    for actual in run_warm_ranks(distribution_by_parts, 2, [0, 15, V], rows):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_no_tokens_on_several_ranks():
    for outputs, gradients in run_warm_ranks(by_parts, 2, [0, 15, V], True, 0, 1.0):
        assert all(tensor.shape == (0,) for tensor in outputs)
        assert all(not gradient.any() for gradient in gradients)
    for divergence, gradients in run_warm_ranks(divergence_by_parts, 2, [0, 15, V], 0, 1.0):
        assert divergence.shape == (0,)
        assert all(not gradient.any() for gradient in gradients)
