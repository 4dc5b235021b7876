"""An episode: a conversation of the policy with an environment, as one row of tokens.

    episode.add_answer(ids, log_probs, text)      # as they were sampled: mask true
    episode.add_told(ids, messages)               # what the environment says: mask false
    episode.add_reward(1.0)                       # of the last answer

Tokens are only ever appended. Text is for people, reward functions and environments; it is never tokenized again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from camshaft.agents.environment import Fault, Message
from camshaft.rewards.messages import Outcome

StopReason = Literal["done", "turns", "length", "prompt", "timeout", "error"]
"""`done`: the environment has ended the episode. `turns`: it has the maximum number of answers. `length`: an answer, or
what the environment says, does not fit into the row. `prompt`: the prompt is too long after `reset`, and the episode
was not played. `timeout`: the calls of the environment took too long in total. `error`: the environment has failed."""


@dataclass
class Episode:
    """Tokens behind a prompt, and the conversation that they are."""

    messages: list[Message]
    """The conversation, with the messages of the prompt and the texts of the answers."""
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """All tokens behind the prompt."""
    mask: list[bool] = field(default_factory=list)
    """For each of `tokens`, true if the policy has sampled it."""
    log_probs: list[float] = field(default_factory=list)
    """For each of `tokens`, its log-prob under the sampling distribution; 0 if it was not sampled."""
    rewards: list[float] = field(default_factory=list)
    """For each of `tokens`, the reward of the answer that ends with it, or 0."""
    turns: int = 0
    """Number of answers."""
    stop_reason: StopReason | None = None
    """None while the episode is played."""
    fault: Fault | None = None
    """Failure of the environment, with `stop_reason` error."""
    seconds: float = 0.0
    """Time of the environment's calls."""
    num_computed: int = 0
    """Number of tokens that the model has computed for the answers so far."""
    num_calls: int = 0
    """Number of calls of tools."""
    num_errors: int = 0
    """Number of these that have failed, or that could not be read."""
    num_recomputed: int = 0
    """Number of tokens of the history that were computed again for later answers."""
    sampling: list[dict[str, float]] = field(default_factory=list)
    """For each answer, the sampling options that a program has set, if it has set any."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Results of the reward functions that were called with the environment."""
    sequences: list[tuple[int, int]] = field(default_factory=list)
    """For each row of a session with several rows: in `tokens`, the number of tokens of its prompt, and of the tokens
    behind it. The prompt of the first row is `prompt`."""

    def add_answer(
        self, ids: Sequence[int], log_probs: Sequence[float], text: str, **parts: str | Sequence[Message]
    ) -> None:
        """Append the tokens of an answer, as they were sampled. `parts` are further fields of its message."""
        self.tokens += ids
        self.mask += [True] * len(ids)
        self.log_probs += log_probs
        self.rewards += [0.0] * len(ids)
        self.turns += 1
        self.messages.append({"role": "assistant", "content": text, **parts})

    def add_told(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Append the tokens of messages that the policy has not sampled."""
        self.tokens += ids
        self.mask += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.messages += messages

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last token of the last answer, which nothing follows yet."""
        self.rewards[-1] += reward

    def add_final_reward(self, reward: float) -> None:
        """Add the reward of the whole episode to the last token that was sampled."""
        self.rewards[len(self.mask) - 1 - self.mask[::-1].index(True)] += reward


def join_rows(rows: Sequence[Episode]) -> Episode:
    """Return the rows of a session as one episode, whose answers are those of the rows, one row after the other.

    Each further row follows with its prompt. The first message of a further row has the field `row`: 2, 3, and so on.
    """
    if len(rows) == 1:
        return rows[0]
    lists: Any = {name: [] for name in ("messages", "tokens", "mask", "log_probs", "rewards", "sampling", "sequences")}
    joined = replace(rows[0], **lists, turns=0, num_recomputed=0)
    has_options = any(row.sampling for row in rows)
    for number, row in enumerate(rows):
        prompt, messages = [], row.messages
        if number:
            prompt, messages = row.prompt, [{**row.messages[0], "row": number + 1}, *row.messages[1:]]
        joined.add_told(prompt, messages)
        joined.sequences.append((len(prompt), len(row.tokens)))
        joined.tokens += row.tokens
        joined.mask += row.mask
        joined.log_probs += row.log_probs
        joined.rewards += row.rewards
        joined.sampling += row.sampling or [{}] * (row.turns * has_options)
        joined.turns += row.turns
        joined.num_recomputed += row.num_recomputed
        if joined.stop_reason == "done":
            joined.stop_reason = row.stop_reason
    return joined
