"""The Triton kernels of the fused output head, run by the interpreter, compared with the formula in float64."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from camshaft.models import linear_logprob as head
from camshaft.models.linear_logprob import Tile, linear_logprob

pytestmark = pytest.mark.interpreted


@pytest.fixture
def kernels(interpreted: None) -> ModuleType:
    from camshaft.models.triton import linear_logprob

    return linear_logprob


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def oracle(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs over the vocabulary, logsumexp and entropy in float64."""
    scaled = logits.double() / temperature
    log_p = scaled.log_softmax(1)
    return log_p, scaled.logsumexp(1), -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("vocabulary", [1, 2, 77, 4096, 4097, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_tile_is_reduced_as_in_float64(kernels: ModuleType, vocabulary: int, temperature: float):
    logits = 4 * numbers(9, vocabulary)
    columns = torch.arange(9) * vocabulary // 9
    normalizers, chosen, entropy, squares = kernels.reduce_tile(logits, columns, temperature, True, True)
    log_p, lse, expected = oracle(logits, temperature)
    torch.testing.assert_close(normalizers.double(), lse, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(chosen, logits.gather(1, columns[:, None])[:, 0] / temperature)
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares.double(), log_p.exp().square().sum(1), rtol=1e-5, atol=1e-7)
    for need_entropy, need_squares in ((False, False), (True, False), (False, True)):
        results = kernels.reduce_tile(logits, columns, temperature, need_entropy, need_squares)
        needed = [normalizers, chosen, *([entropy] if need_entropy else []), *([squares] if need_squares else [])]
        assert [each.tolist() for each in results] == [each.tolist() for each in needed]


def test_a_target_outside_the_tile_has_no_gradient(kernels: ModuleType):
    logits = numbers(4, 50)
    columns = torch.tensor([-1, 50, 49, -(2**40)])
    _, chosen = kernels.reduce_tile(logits, columns, 1.0, False, False)
    assert chosen.tolist() == [0, 0, logits[2, 49].item(), 0]
    normalizers, ones = logits.logsumexp(1), torch.ones(4)
    grad = kernels.logit_gradient(logits, columns, normalizers, None, ones, None, 1.0, torch.float32)
    expected = -logits.softmax(1)
    expected[2, 49] += 1
    torch.testing.assert_close(grad, expected)


def test_logits_of_minus_infinity(kernels: ModuleType):
    """Logits are -inf in a part of the vocabulary, in the whole first block, or in the whole tile."""
    logits = numbers(3, 5000)
    logits[0, ::2] = -torch.inf
    logits[1, :4500] = -torch.inf
    logits[2] = -torch.inf
    columns = torch.tensor([1, 4999, 0])
    normalizers, _, entropy = kernels.reduce_tile(logits, columns, 1.0, True, False)
    assert normalizers[2] == -torch.inf
    for row, finite in ((0, logits[:1, 1::2]), (1, logits[1:2, 4500:])):
        _, lse, expected = oracle(finite, 1.0)
        torch.testing.assert_close((normalizers[row].double(), entropy[row].double()), (lse[0], expected[0]))
    ones = torch.ones(2)
    grad = kernels.logit_gradient(logits[:2], columns[:2], normalizers[:2], entropy[:2], ones, ones, 1.0, torch.float32)
    assert grad.isfinite().all()
    assert (grad[logits[:2] == -torch.inf] == 0).all()


def test_nan_logits_give_nan(kernels: ModuleType):
    logits = numbers(3, 300)
    logits[1, 7] = torch.nan
    results = kernels.reduce_tile(logits, torch.zeros(3, dtype=torch.int64), 1.0, True, False)
    assert [results[i].isnan().tolist() for i in (0, 2)] == [[False, True, False]] * 2


def test_large_logits_lose_no_digits(kernels: ModuleType):
    """Adding an offset to all logits changes the entropy only by the rounding of the logits."""
    logits = numbers(5, 600)
    shifted = (logits * 1024).round() / 1024 + 4096  # exact in float32
    _, _, entropy = kernels.reduce_tile(shifted, torch.zeros(5, dtype=torch.int64), 1.0, True, False)
    torch.testing.assert_close(entropy.double(), oracle(shifted, 1.0)[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("of_log_probs", "of_entropy"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_a_tile(kernels: ModuleType, of_log_probs: bool, of_entropy: bool, dtype: torch.dtype):
    logits, columns, temperature = 3 * numbers(7, 5000), torch.arange(7) * 800, 0.7
    log_p, lse, entropy = oracle(logits, temperature)
    of = (numbers(7, seed=1) if of_log_probs else None, numbers(7, seed=2) if of_entropy else None)
    grad = kernels.logit_gradient(logits, columns, lse.float(), entropy.float(), *of, temperature, dtype)
    scaled = (logits.double() / temperature).requires_grad_()
    log_p = scaled.log_softmax(1)
    objective = torch.zeros(())
    if of[0] is not None:
        objective = objective + (log_p.gather(1, columns[:, None])[:, 0] * of[0]).sum()
    if of[1] is not None:
        objective = objective - ((log_p.exp() * log_p).sum(1) * of[1]).sum()
    (expected,) = torch.autograd.grad(objective, scaled)
    assert grad.dtype == dtype
    within = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 5e-4}[dtype]  # bfloat16 truncates
    torch.testing.assert_close(grad.double(), expected, rtol=within, atol=2e-7 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("tile", [(5, 7), (37, 29), (10, 4)])
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
def test_all_tiles_give_the_values_and_gradients_of_float64(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int], temperature: float
):
    """Tiles on the GPU path agree with float64; the torch operators of the CPU path are disabled."""
    monkeypatch.setattr(head, "_kernels", lambda _: kernels)
    monkeypatch.setattr(head, "_logit_gradient", None)
    hidden, weight = numbers(37, 8).requires_grad_(), numbers(29, 8, seed=1).requires_grad_()
    targets = torch.randint(0, 29, (37,), generator=torch.Generator().manual_seed(2))
    mixture = numbers(2, 37, seed=3)
    outputs = ("entropy", "sum_pi_squared")
    fused: Any = linear_logprob(hidden, weight, targets, None, temperature, outputs, Tile(*tile))
    gradients = torch.autograd.grad((torch.stack(fused[:2]) * mixture).sum(), [hidden, weight])
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    log_p = (wide[0] @ wide[1].t() / temperature).log_softmax(1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    squares = log_p.detach().exp().square().sum(1)
    torch.testing.assert_close([each.double() for each in fused], [*expected, squares], rtol=1e-5, atol=1e-5)
    expected_gradients = torch.autograd.grad((torch.stack(expected) * mixture).sum(), wide)
    torch.testing.assert_close([each.double() for each in gradients], list(expected_gradients), rtol=1e-4, atol=1e-5)


def test_no_tokens_give_empty_results(kernels: ModuleType):
    empty = torch.empty(0, 50)
    nowhere = torch.empty(0, dtype=torch.int64)
    assert [each.shape for each in kernels.reduce_tile(empty, nowhere, 1.0, True, True)] == [(0,)] * 4
    grad = kernels.logit_gradient(empty, nowhere, empty[:, 0], None, empty[:, 0], None, 1.0, torch.bfloat16)
    assert grad.shape == (0, 50)
