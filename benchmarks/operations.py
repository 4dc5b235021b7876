"""Operations and bytes of the phases of a training step, counted from the model and the lengths.

    work = update(shape, [Group(prompt=64, responses=[128] * 8)], steps=2)      # Work(operations, bytes)

Only the work that the mathematics requires counts, by the cheaper method where there are two. Padding, recomputed
prompts, unused logits and elementwise operations do not count.

- Operations: products with the weights for every token of a prompt (once for all of its responses) and every token of a
  response but its last; the output layer for tokens that predict a response token; causal attention. A backward pass
  takes twice as many.
- Bytes: traffic between memory and processor for numbers of `number` bytes (default: float32). The caches are assumed
  to keep everything inside a block of layers, and nothing between blocks. Every pass reads the weights once, and writes
  and reads the hidden states that enter a block or the head. In an update this happens per optimizer step. The backward
  pass reads weights and hidden states again, and writes and reads the gradients of the hidden states. It writes the
  gradients of the weights. The step reads them for the norm and once more, and reads and writes both moments and the
  weights. Generation makes one pass over the prompts and one for each further token of the longest response, for all
  rows at once. Each pass reads the weights and the keys and values of the unfinished rows; those of a prompt are read
  once for all its rows. Each token's keys and values are written once.

The module imports only the standard library.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Shape:
    """A decoder like Qwen2 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int

    def weights_of_layers(self) -> int:
        """Count the weights of all layers' matrices."""
        keys = self.hidden * self.kv_heads // self.heads
        return self.layers * (2 * self.hidden**2 + 2 * self.hidden * keys + 3 * self.hidden * self.intermediate)


@dataclass(frozen=True)
class Group:
    """Number of tokens of a prompt and of each of its responses."""

    prompt: int
    responses: Sequence[int]

    def tokens(self) -> int:
        """Count the tokens of a pass; the last token of a response predicts nothing and is not computed."""
        return self.prompt + sum(n - 1 for n in self.responses)

    def predicting(self) -> int:
        """Count the tokens that predict a response token; the last prompt token predicts all first ones."""
        return 1 + sum(n - 1 for n in self.responses)

    def pairs(self) -> int:
        """Count the pairs of a token and a token that it attends to."""
        responses = sum((n - 1) * self.prompt + (n - 1) * n // 2 for n in self.responses)
        return self.prompt * (self.prompt + 1) // 2 + responses

    def read_again(self) -> int:
        """Count the cached positions that are read while the responses are generated token by token."""
        return self.prompt * (max(self.responses) - 1) + sum((n - 1) * (n - 2) // 2 for n in self.responses)


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes to and from memory."""

    operations: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    def __truediv__(self, parts: float) -> "Work":
        return Work(self.operations / parts, self.bytes / parts)


NOTHING = Work(0, 0)


def evaluation(shape: Shape, groups: Sequence[Group], role: str = "actor", number: int = NUMBER) -> Work:
    """Count a forward pass for log-probs, or for values with a head of one output."""
    numbers = _read(shape, role) + 2 * _hidden(shape, sum(group.tokens() for group in groups))
    return Work(_forward(shape, groups, role), number * numbers)


def update(shape: Shape, groups: Sequence[Group], steps: int, role: str = "actor", number: int = NUMBER) -> Work:
    """Count forward and backward passes and AdamW steps with gradient clipping.

    The passes use numbers of `number` bytes; weights, gradients and optimizer moments are float32.
    """
    weights = shape.weights_of_layers() + shape.vocab_size * shape.hidden
    hidden = _hidden(shape, sum(group.tokens() for group in groups))
    of_passes, of_steps = 2 * steps * _read(shape, role) + 5 * hidden, 9 * steps * weights
    return Work(3 * _forward(shape, groups, role), number * of_passes + NUMBER * of_steps)


def generation(shape: Shape, groups: Sequence[Group], number: int = NUMBER) -> Work:
    """Count the generation of the responses with a KV cache."""
    passes = max(max(group.responses) for group in groups)
    cached = 2 * shape.layers * shape.hidden * shape.kv_heads // shape.heads
    positions = sum(group.tokens() + group.read_again() for group in groups)
    hidden = 2 * _hidden(shape, sum(group.prompt for group in groups))
    return Work(_forward(shape, groups), number * (passes * _read(shape) + hidden + cached * positions))


def _forward(shape: Shape, groups: Sequence[Group], role: str = "actor") -> float:
    """Count operations: two per weight and token, four per hidden unit and pair of tokens in attention."""
    tokens, predicting, pairs = (
        sum(count(group) for group in groups) for count in (Group.tokens, Group.predicting, Group.pairs)
    )
    attention = 4 * shape.layers * shape.hidden * pairs
    return 2 * shape.weights_of_layers() * tokens + attention + 2 * _head(shape, role) * predicting


def _head(shape: Shape, role: str) -> int:
    """Count the weights of the head."""
    return shape.hidden * (shape.vocab_size if role == "actor" else 1)


def _read(shape: Shape, role: str = "actor") -> int:
    """Count the weights that a pass reads."""
    return shape.weights_of_layers() + _head(shape, role)


def _hidden(shape: Shape, tokens: int) -> int:
    """Count the numbers that enter the blocks and the head."""
    return (shape.layers + 1) * shape.hidden * tokens
