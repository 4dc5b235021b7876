"""Sample the next token with pure functions of the logits and one uniform random number per row.

    scores = restrict(logits, temperature=0.8, top_k=50, top_p=0.95)
    tokens, log_probs = draw(scores, uniform_numbers(seeds, positions))
    tokens, log_probs = sample_greedy(logits)

`Penalties` change the logits first. Then the temperature applies, then `min_p`, `top_k` and `top_p`, as in vLLM.
Excluded tokens get the score -inf. The log-probs refer to the
remaining distribution, from which the token is sampled. Each uniform number is a hash of the row's seed and the token's
position, so the samples of a row do not depend on the other rows of the batch. Third-party generators may import this
module.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from camshaft.device import to_device
from camshaft.ragged import Ragged

MAX_SINGLE_PASS = 1024
"""Maximum size of a vocabulary that is searched in one pass. Larger vocabularies are searched in blocks."""

BLOCK = 128
"""Number of tokens per block."""

NUCLEUS_CANDIDATES = 256
"""Number of top tokens whose probabilities usually add up to `top_p`. If they do not, the entire row is sorted."""

PROBABILITY_SCALE = 2.0**48
"""Scale at which probabilities are converted to integers before they are summed."""


class Penalties:
    """Penalties on tokens that a row already contains, with the definitions of vLLM.

        penalties = Penalties(prompts, max_tokens, repetition=1.2, presence=0.5, frequency=0.1)
        logits = penalties.apply(logits, rows)          # (b, V), for the rows (b,) of the batch
        penalties.add(rows, tokens)

    A logit of a token in the prompt or the response is divided by `repetition` if it is positive, and multiplied by it
    otherwise. Then `frequency` times the number of occurrences in the response, and `presence` if there is one, are
    subtracted.
    """

    def __init__(
        self, prompts: Ragged, max_tokens: int, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
    ):
        self.repetition, self.presence, self.frequency = repetition, presence, frequency
        self.prompts = prompts.padded("right", -1)
        self.responses = self.prompts.new_full((len(prompts), max_tokens), -1)
        self.lengths = torch.zeros_like(self.prompts[:, 0])

    def apply(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the penalized logits. Float64 logits give float64; all other dtypes give float32."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        in_prompt, counts = (_count(tokens[rows], logits) for tokens in (self.prompts, self.responses))
        penalized = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = torch.where((in_prompt + counts) > 0, penalized, logits)
        return logits - self.frequency * counts - self.presence * (counts > 0)

    def add_rows(self, tokens: Ragged) -> None:
        """Append a row of `tokens` to the response of each row."""
        columns = tokens.positions() + self.lengths[tokens.row_ids()]
        self.responses[tokens.row_ids(), columns] = tokens.values
        self.lengths += to_device(tokens.lengths, self.lengths.device)

    def extend(self, other: "Penalties") -> None:
        """Append the rows of others with the same strengths."""
        self.prompts, self.responses = (
            torch.cat(
                [
                    F.pad(tokens, (0, max(0, others.shape[1] - tokens.shape[1])), value=-1)
                    for tokens, others in ((mine, theirs), (theirs, mine))
                ]
            )
            for mine, theirs in ((self.prompts, other.prompts), (self.responses, other.responses))
        )
        self.lengths = torch.cat([self.lengths, other.lengths])

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Append one token (b,) to the response of each row (b,)."""
        self.responses[rows, self.lengths[rows]] = tokens
        self.lengths[rows] += 1


def _count(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return how often each token of the vocabulary occurs in each row, in the shape and dtype of `logits`."""
    size = logits.shape[-1]
    counts = logits.new_zeros(len(tokens), size + 1)  # the last column counts the padding
    return counts.scatter_add_(1, tokens.where(tokens >= 0, size), counts.new_ones(()).expand(tokens.shape))[:, :size]


def restrict(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return the scores (B, V) of the distribution to sample from, with -inf for excluded tokens.

    Float64 logits give float64 scores; all other dtypes give float32. `min_p` excludes tokens whose probability is
    below `min_p` times that of the most probable token. `top_k` < 1, `top_p` >= 1 and `min_p` = 0 keep all tokens. If
    several tokens tie at the threshold, all of them are kept, because another implementation could not reproduce an
    arbitrary choice between them.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scores = scores / temperature
    if min_p > 0:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    size = scores.shape[-1]
    num_kept = min(top_k, size) if top_k > 0 else size
    if num_kept < size:
        scores = scores.masked_fill(scores < scores.topk(num_kept, dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        scores = scores.masked_fill(scores < _nucleus_threshold(scores, top_p, num_kept), -torch.inf)
    return scores


def _nucleus_threshold(scores: Tensor, top_p: float, num_kept: int) -> Tensor:
    """Return the lowest score (B, 1) in the `top_p` nucleus. At most `num_kept` scores per row are finite."""
    total = scores.double().logsumexp(-1, keepdim=True)
    for width in (min(num_kept, NUCLEUS_CANDIDATES), num_kept):
        top_scores = scores.topk(width, dim=-1).values  # in descending order
        probs = (top_scores.double() - total).exp()
        cdf = probs.cumsum(-1)
        if width == num_kept or bool((cdf[:, -1] >= top_p).all()):
            break
    last_index = (cdf - probs < top_p).sum(-1, keepdim=True).clamp(min=1) - 1
    return top_scores.gather(-1, last_index)


def draw(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the CDF; return tokens (B,) and float32 log-probs (B,).

    `uniforms` is float64 of shape (B,) with values in [0, 1). A token of probability zero is never sampled. Scores that
    contain NaN or +inf give log-probs that are not finite.
    """
    probs = scores.softmax(-1)
    size = probs.shape[-1]
    tokens = _sample_index(probs, uniforms)[0] if size <= MAX_SINGLE_PASS else _sample_index_in_blocks(probs, uniforms)
    # With NaN scores the search returns an index past the end.
    tokens = tokens.clamp(max=size - 1)
    return tokens[:, 0], probs.gather(-1, tokens)[:, 0].log().float()


def sample_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token per row and its log-prob at temperature 1. Ties select the lowest token id."""
    tokens = logits.argmax(-1)
    probs = restrict(logits, temperature=1.0).softmax(-1)
    return tokens, probs.gather(-1, tokens[:, None])[:, 0].log().float()


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return float64 numbers in [0, 1) that are a fixed function of seed and position.

    `seeds` and `positions` are int64 tensors that are broadcast. The result is element `positions` of the splitmix64
    stream with initial state mix(seeds + g). With g = 0x9E3779B97F4A7C15,

        number = (mix(mix(seed + g) + (position + 1) * g) >> 11) * 2^-53

    where mix is the finalizer of splitmix64 (see `_mix`) and all arithmetic is modulo 2^64.
    """
    return _shift(_mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN), 11).double() * 2.0**-53


def row_seeds(seed: int, call: int, num_rows: int) -> Tensor:
    """Return int64 seeds of shape (num_rows,) for the rows of call number `call`. Collisions are improbable."""
    streams = _mix(_mix(torch.tensor([seed]) + _GOLDEN) + torch.tensor([call + 1]) * _GOLDEN)
    return _mix(streams + (torch.arange(num_rows) + 1) * _GOLDEN)


def restart_seeds(seeds: Tensor, num_earlier: Tensor) -> Tensor:
    """Return new int64 seeds (B,) for rows that continue after `num_earlier` tokens, and the same seeds for new rows.

    A generator that draws the numbers of a row one after another would otherwise repeat those of the earlier tokens.
    """
    return _mix(_mix(seeds + _GOLDEN) + num_earlier * _GOLDEN).where(num_earlier > 0, seeds)


def mix_seeds(seeds: Tensor) -> Tensor:
    """Map int64 seeds (B,) one-to-one so that each input bit affects all output bits.

    Generators that use only some of the bits of a seed need this.
    """
    return _mix(seeds + _GOLDEN)


def _sample_index(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample indices (B, 1) in proportion to `weights` (B, W); return them, the CDF (B, W), and the CDF points (B,).

    Integer sums are exact in any order, so the CDF never decreases and is constant exactly where the weight is zero.
    """
    cdf = (weights * PROBABILITY_SCALE).long().cumsum(-1)  # multiplying by a power of two is exact
    point = uniforms * cdf[:, -1]
    return torch.searchsorted(cdf, point.long()[:, None], right=True), cdf, point


def _sample_index_in_blocks(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample indices (B, 1) in proportion to `probs` (B, V) by sampling first a block and then a token of that block.

    This reads a large vocabulary once, to sum each block, instead of converting all probabilities to integers and
    computing their cumulative sum.
    """
    size = probs.shape[-1]
    full_blocks = size - size % BLOCK
    totals = probs[:, :full_blocks].unflatten(-1, (-1, BLOCK)).sum(-1)
    if full_blocks < size:
        totals = torch.cat([totals, probs[:, full_blocks:].sum(-1, keepdim=True)], dim=-1)
    block, cdf, point = _sample_index(totals, uniforms)
    block = block.clamp(max=totals.shape[-1] - 1)
    start, end = torch.nn.functional.pad(cdf, (1, 0)).gather(-1, torch.cat([block, block + 1], dim=1)).unbind(1)
    fraction = (point - start) / (end - start)  # relative position within the block
    index = block * BLOCK + torch.arange(BLOCK, device=probs.device)
    block_probs = probs.gather(-1, index.clamp(max=size - 1)).masked_fill(index >= size, 0)
    # `_sample_index` expects weights that add up to about one.
    token, _, _ = _sample_index(block_probs / block_probs.sum(-1, keepdim=True), fraction.clamp(0, 1 - 2.0**-53))
    return block * BLOCK + token


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Increment of splitmix64 as a signed integer."""


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to an int64 tensor, whose products wrap around like uint64 products."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros. torch's own shift fills int64 with the sign bit."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
