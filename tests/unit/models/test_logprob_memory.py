"""The memory of log-probs does not grow with the vocabulary, counted at full size on tensors without storage.

Tensors on "meta" have sizes but no storage, so the tests can use eight thousand tokens and a vocabulary of 150
thousand. They take the tiled code path of CUDA tensors (`support/host_waits.py`). The count includes every tensor that
an operator returns, for its lifetime, but no temporary memory inside an operator.
"""

import weakref
from typing import Any

import pytest
import torch
from support.host_waits import accelerated
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from camshaft.models.linear_logprob import linear_logprob

TOKENS, HIDDEN = 8192, 1536
VOCABULARIES = (32_000, 75_000, 150_000)
BUFFER = 4 << 26
"""Bytes of a tile of float32 logits on an accelerator."""


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors created inside: current and peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [storage._cdata for storage in _storages((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._count(storage, inputs)
        return result

    def _count(self, storage: Any, inputs: list[int]) -> None:
        if storage in self._known or storage._cdata in inputs:
            return
        self._known.add(storage)
        weakref.finalize(storage, self._gone, storage.nbytes())
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)

    def _gone(self, count: int) -> None:
        self.now -= count


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def beyond(monkeypatch: pytest.MonkeyPatch, vocabulary_size: int, backward: bool) -> int:
    """Return the bytes beyond outputs and gradients, in units of hidden states in float32."""
    with accelerated(monkeypatch) as device:
        options: Any = {"device": device, "dtype": torch.bfloat16, "requires_grad": backward}
        hidden, weight = torch.empty(TOKENS, HIDDEN, **options), torch.empty(vocabulary_size, HIDDEN, **options)
        targets = torch.empty(TOKENS, dtype=torch.int64, device=device)
        with LiveBytes() as alive:
            log_probs, entropy, _ = linear_logprob(hidden, weight, targets, outputs=("entropy",))
            assert entropy is not None
            excluded = log_probs.nbytes + entropy.nbytes
            if backward:
                torch.autograd.backward([log_probs, entropy], [torch.empty_like(log_probs), torch.empty_like(entropy)])
                excluded += 4 * hidden.numel() + weight.nbytes
        return alive.most - excluded


def test_the_counter_counts_live_tensors() -> None:
    with LiveBytes() as alive:
        one = torch.empty(4, device="meta", dtype=torch.float32)
        two = one + 1
        assert alive.now == 32
        view = two[1:]
        del two
        assert alive.now == 32
        del view
        assert alive.now == 16
        assert (one * 2).shape == (4,)
    assert (alive.now, alive.most) == (16, 32)


def test_a_forward_pass_takes_as_much_at_every_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [beyond(monkeypatch, vocabulary_size, backward=False) for vocabulary_size in VOCABULARIES]
    assert max(peaks) < 1.01 * min(peaks)  # each tile keeps three numbers per token
    assert max(peaks) < 4 * BUFFER


def test_a_backward_pass_takes_as_much_at_every_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [beyond(monkeypatch, vocabulary_size, backward=True) for vocabulary_size in VOCABULARIES]
    assert min(peaks) == max(peaks) < 5 * BUFFER


def test_full_logits_would_be_counted() -> None:
    hidden = torch.empty(TOKENS, HIDDEN, device="meta", dtype=torch.bfloat16)
    peaks = []
    for vocabulary_size in VOCABULARIES:
        with LiveBytes() as alive:
            (hidden @ hidden.new_empty(vocabulary_size, HIDDEN).t()).float().log_softmax(dim=-1)
        peaks.append(alive.most)
    assert peaks[-1] > 4 * peaks[0] > 16 * BUFFER
