"""The fused output head on a GPU, where tiles use Triton kernels, compared with the formula in float64."""

import pytest
import torch
from torch import Tensor

from camshaft.models.linear_logprob import linear_logprob

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")]

ROWS, HIDDEN = 1000, 256


def inputs(vocabulary_size: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    hidden, weight = (
        numbers(*shape).to(dtype).requires_grad_() for shape in ((rows, HIDDEN), (vocabulary_size, HIDDEN))
    )
    targets = torch.randint(0, vocabulary_size, (rows,), generator=generator, device="cuda")
    return hidden, weight, targets, numbers(2, rows)


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
@pytest.mark.parametrize("vocabulary_size", [1000, 151_936])
def test_values_and_gradients(dtype: torch.dtype, within: float, vocabulary_size: int):
    hidden, weight, targets, mixture = inputs(vocabulary_size, dtype)
    fused = linear_logprob(hidden, weight, targets, None, 0.7, outputs=("entropy", "sum_pi_squared"))
    assert fused.entropy is not None
    gradients = torch.autograd.grad((fused[0] * mixture[0] + fused.entropy * mixture[1]).sum(), [hidden, weight])
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    log_p = (wide[0] @ wide[1].t() / 0.7).log_softmax(1)
    p = log_p.exp()
    reference = log_p.gather(1, targets[:, None])[:, 0], -(p * log_p).sum(1), p.square().sum(1)
    expected_gradients = torch.autograd.grad((reference[0] * mixture[0] + reference[1] * mixture[1]).sum(), wide)
    for actual, expected in zip((*fused, *gradients), (*reference, *expected_gradients), strict=True):
        assert actual is not None
        assert float((actual.double() - expected).norm() / expected.norm()) < within


def test_memory_does_not_grow_with_the_vocabulary():
    """Only tiles use memory beyond the gradient of the weight. Fewer tokens would not fill a tile of 50,000 entries."""
    peaks = []
    for vocabulary_size in (50_000, 150_000):
        hidden, weight, targets, mixture = inputs(vocabulary_size, torch.bfloat16, rows=8192)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log_probs, *_ = linear_logprob(hidden, weight, targets, None, 1.0)
        gradients = torch.autograd.grad((log_probs * mixture[0]).sum(), [hidden, weight])
        of_weight = gradients[1].numel() * gradients[1].element_size()
        peaks.append(torch.cuda.max_memory_allocated() - before - of_weight)
    assert peaks[1] < 1.1 * peaks[0]
