"""Episodes of several turns compared with single answers of as many sampled tokens, on the built-in generator.

    python benchmarks/conversations.py --out benchmarks/results/conversations.md

An environment without latency answers each turn. Four sides take turns within each round and use the same prompts and
seeds:

- kept: rows are kept between turns (`row_ids`)
- recomputed: the same episodes without, so that each turn computes the whole history
- single: one answer per row, with as many tokens as the row has sampled in its turns
- without turns: the same, with what the environment has said in the prompts. It computes the tokens that an episode has
  to compute, so its speed is about what turns that cost nothing would reach.

The number of prompt tokens that the model computes is exact. Distinct context tokens are the tokens of all episodes
that were not sampled; a prompt that several episodes share counts once. Speeds are sampled tokens per second; ratios
are medians of the ratios within a round. CPU time is that of the process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import machine

from camshaft.agents.bridge import Bridge
from camshaft.agents.environment import Host, Start
from camshaft.agents.episode import Episode
from camshaft.agents.play import Limits, Question, play
from camshaft.config.backends import TORCH
from camshaft.config.engine import EngineModel
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import load_tokenizer, stored_weights
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

GROUP = 4
"""Episodes per prompt."""
ANSWER = 24
"""Maximum number of tokens of an answer."""

HEADER = """\
| episodes x turns | computed, recomputed | computed, kept | single, tokens/s | recomputed | kept | without turns |
|---|---|---|---|---|---|---|"""


class Guess:
    """Replies to a guess of a number."""

    def reset(self, secret: int) -> str:
        self.secret = secret
        return "Guess a number from 1 to 9."

    def step(self, answer: str) -> tuple[str, float, bool]:
        digits = [character for character in answer if character.isdigit()]
        if not digits:
            return "no digit, try again", 0.0, False
        return "higher" if int(digits[0]) < self.secret else "lower", 0.0, False


class Counted(TorchRollout):
    """The built-in generator. It counts prompt tokens, and may have a token limit per row."""

    limit_of: torch.Tensor | None = None
    computed = 0.0

    def limits(self, prompts: Ragged, sampling: SamplingParams, num_embeddings: int) -> torch.Tensor:
        limits = super().limits(prompts, sampling, num_embeddings)
        return limits if self.limit_of is None else self.limit_of

    def generate_sequences(self, *arguments: Any, **options: Any) -> Generation:
        out = super().generate_sequences(*arguments, **options)
        self.computed += out.metrics["prompt_tokens_computed"]
        return out


class Recomputing(Counted):
    capabilities = replace(TORCH, keeps_rows=False)


@dataclass
class Turns:
    """Seconds, sampled tokens and prompt tokens of a side in one round."""

    seconds: float
    cpu: float
    sampled: int
    computed: float
    context: int = 0


def questions(episodes: int, number: int) -> list[Question]:
    message = [{"role": "user", "content": ""}]
    return [
        Question(message, Start({"secret": 1 + i // GROUP % 9}, i // GROUP, i), 1000 * number + i)
        for i in range(episodes)
    ]


def played(rollout: Counted, bridge: Bridge, turns: int, episodes: int, number: int) -> tuple[Turns, list[Episode]]:
    limits = Limits(max_prompt=128, max_response=900, max_turns=turns, max_turn_length=ANSWER)
    rollout.computed, start, cpu = 0.0, time.perf_counter(), time.process_time()
    result = play(rollout, Host({"": Guess}), questions(episodes, number), bridge, limits, SamplingParams(900))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    sampled = sum(sum(episode.mask) for episode in result)
    context = sum(len(told(episode)) for episode in result)
    context += sum(map(len, {tuple(episode.prompt) for episode in result}))
    return Turns(seconds, cpu, sampled, rollout.computed, context), result


def told(episode: Episode) -> list[int]:
    """Return the tokens that the environment has said."""
    return [token for token, is_sampled in zip(episode.tokens, episode.mask, strict=True) if not is_sampled]


def single(rollout: Counted, episodes: list[Episode], with_told: bool = False) -> Turns:
    rows = Ragged.from_rows([episode.prompt + told(episode) * with_told for episode in episodes], torch.int64)
    rollout.limit_of = torch.tensor([sum(episode.mask) for episode in episodes])
    rollout.computed, start, cpu = 0.0, time.perf_counter(), time.process_time()
    out = rollout.generate_sequences(rows, SamplingParams(900, ignore_eos=True), torch.arange(len(rows)))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    rollout.limit_of = None
    return Turns(seconds, cpu, len(out.responses.values), rollout.computed)


def measured(folder: Path, turns: int, episodes: int, rounds: int) -> list[dict[str, Turns]]:
    config = RolloutEngineConfig(model_path=str(folder), max_model_len=1024)
    bridge = Bridge(load_tokenizer(str(folder)))
    rollouts: dict[str, Counted] = {"kept": Counted(config), "recomputed": Recomputing(config)}
    results: list[dict[str, Turns]] = []
    for number in range(rounds + 1):  # the first one warms up
        spent: dict[str, Turns] = {}
        shift = number % 2
        for name in ("kept", "recomputed")[:: 1 - 2 * shift]:
            rollouts[name].load_weights(stored_weights(EngineModel(path=str(folder))))
            spent[name], result = played(rollouts[name], bridge, turns, episodes, number)
            if name == "kept":
                for side in ("single", "without turns")[:: 1 - 2 * shift]:
                    spent[side] = single(rollouts[name], result, side == "without turns")
        assert spent["kept"].sampled == spent["recomputed"].sampled == spent["single"].sampled
        results.append(spent)
    return results[1:]


def relative_speed(rounds: list[dict[str, Turns]], name: str) -> str:
    """Return the speed of a side relative to that of single answers, by wall and by CPU time."""
    wall = statistics.median(spent["single"].seconds / spent[name].seconds for spent in rounds)
    cpu = statistics.median(spent["single"].cpu / spent[name].cpu for spent in rounds)
    return f"{wall:.2f} ({cpu:.2f})"


def line(turns: int, episodes: int, rounds: list[dict[str, Turns]]) -> str:
    cells = [f"{episodes} x {turns}"]
    for name in ("recomputed", "kept"):
        cells.append(f"{sum(s[name].computed for s in rounds) / sum(s[name].context for s in rounds):.2f}")
    single_speed = statistics.median(spent["single"].sampled / spent["single"].seconds for spent in rounds)
    cells.append(f"{single_speed:,.0f}")
    cells += [relative_speed(rounds, name) for name in ("recomputed", "kept", "without turns")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=lambda text: [int(part) for part in text.split(",")], default=[4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, hidden=128, layers=4, seed=3)
        rows = [
            line(turns, arguments.episodes, measured(Path(folder), turns, arguments.episodes, arguments.rounds))
            for turns in arguments.turns
        ]
    text = f"""# Episodes of several turns

Prompt tokens that the model computes, per distinct context token, and sampled tokens per second relative to single
answers with as many sampled tokens. Environments take no time, answers have at most {ANSWER} tokens, {GROUP} episodes
share a prompt. Median of {arguments.rounds} rounds on one thread, in which the sides take turns; in parentheses by CPU
time. The last column is about the bound: single answers to prompts with all that the environment says in the episode,
so that the same tokens are computed and attended to, but in one call and without environments.

{machine()}

{HEADER}
{chr(10).join(rows)}
"""
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
