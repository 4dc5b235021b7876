"""Episodes over a rollout: tokens, masks, log-probs and limits, for chat templates of several families."""

import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import CHAT_FAMILIES, talking_model, talking_tokenizer
from transformers import AutoModelForCausalLM

from camshaft.agents.bridge import Bridge
from camshaft.agents.environment import Host, Start
from camshaft.agents.episode import Episode
from camshaft.agents.messages import Source, Spec
from camshaft.agents.play import Limits, Question, Schedule, play
from camshaft.agents.pool import EnvironmentPool
from camshaft.config.backends import TORCH
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import quiet_transformers
from camshaft.rollout import BaseRollout, SamplingParams, build_rollout
from camshaft.rollout.builtin.rollout import TorchRollout

ROUNDING = 1e-5
MAX_TURNS = 8
PROMPT = [{"role": "user", "content": "Say something. "}]


class Counting:
    """Repeats the beginning of an answer, with a number."""

    def reset(self, limit: int, seed: int) -> str:
        self.turn, self.limit = 0, limit
        return f"Seed {seed}."

    def step(self, answer: str) -> tuple[str | None, float, bool]:
        self.turn += 1
        done = self.turn == self.limit
        return None if done else f"{self.turn}: {answer[:3]}", float(self.turn), done


class Talk:
    """A family with its model, rollout and bridge."""

    def __init__(self, name: str, folder: Path):
        self.family, self.folder = CHAT_FAMILIES[name], talking_model(CHAT_FAMILIES[name], folder)
        self.tokenizer = talking_tokenizer(self.family)
        with quiet_transformers():
            self.oracle: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        config = RolloutEngineConfig(model_path=str(self.folder), max_model_len=512)
        self.rollout: BaseRollout = build_rollout("torch", config)
        self.rollout.load_weights(self.oracle.named_parameters())
        self.bridge = Bridge(self.tokenizer)

    def play(
        self,
        count: int = 6,
        turns: int = MAX_TURNS,
        environment: Any = Counting,
        first_seed: int = 0,
        schedule: Schedule = "waves",
        **limits: Any,
    ) -> list[Episode]:
        """Play with a class, or with environments that exist already."""
        seeds = range(first_seed, first_seed + count)
        questions = [Question(PROMPT, Start({"limit": turns}, seed=7, row_seed=seed), seed) for seed in seeds]
        given = Limits(**{"max_prompt": 64, "max_response": 400, **limits})
        environments = Host({"": environment}) if isinstance(environment, type) else environment
        return play(self.rollout, environments, questions, self.bridge, given, SamplingParams(400), schedule)

    @torch.no_grad()
    def log_probs(self, episode: Episode) -> torch.Tensor:
        """Return the log-prob of each token behind the prompt, computed by transformers in one pass over the row."""
        ids = torch.tensor([episode.prompt + episode.tokens])
        log_probs = self.oracle(ids).logits[0, :-1].double().log_softmax(-1)
        return log_probs.gather(-1, ids[0, 1:, None])[len(episode.prompt) - 1 :, 0]


@pytest.fixture(scope="module", params=CHAT_FAMILIES)
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talk:
    return Talk(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    return Talk("chatml", tmp_path_factory.mktemp("one") / "model")


def test_the_row_has_the_log_probs_of_sampling(talk: Talk) -> None:
    for episode in talk.play():
        assert (episode.turns, episode.stop_reason) == (MAX_TURNS, "done")
        mask = torch.tensor(episode.mask)
        expected, sampled = talk.log_probs(episode), torch.tensor(episode.log_probs, dtype=torch.float64)
        assert (expected - sampled)[mask].abs().max() < ROUNDING
        assert not sampled[~mask].any()


def test_the_row_is_the_text_of_the_template(talk: Talk) -> None:
    ended = 0
    for episode in talk.play(16):
        answers = [message["content"] for message in episode.messages if message["role"] == "assistant"]
        assert all(answer == answer.strip() for answer in answers)
        if "" in answers or episode.stop_reason != "done":
            continue  # templates treat an empty message in their own ways
        ended += 1
        row = talk.tokenizer.decode(episode.prompt + episode.tokens)
        text = talk.tokenizer.apply_chat_template(episode.messages, tokenize=False)
        assert isinstance(text, str)
        assert text.removesuffix("<|endoftext|>").rstrip("\n") == row
    assert ended > 1


def test_the_mask_covers_the_answers(talk: Talk) -> None:
    for episode in talk.play(3):
        end = talk.tokenizer.eos_token_id
        ends = [i for i, token in enumerate(episode.tokens) if token == end and episode.mask[i]]
        assert len(ends) == MAX_TURNS  # each answer has sampled its end
        spans = [bool(i) != last for i, last in zip(episode.mask[1:], episode.mask, strict=False)]
        assert sum(spans) == 2 * (MAX_TURNS - 1)
        assert [episode.rewards[i] for i in ends] == [float(turn + 1) for turn in range(MAX_TURNS)]
        assert sum(episode.rewards) == sum(range(1, MAX_TURNS + 1))


def test_templates_that_only_append_are_not_reported(talk: Talk) -> None:
    tools_move = "AVAILABLE_TOOLS" in talk.family.template
    assert (talk.bridge.rewrites() is None) != tools_move


def test_moved_tools_are_reported(tmp_path: Path) -> None:
    rewritten = Bridge(talking_tokenizer(CHAT_FAMILIES["mistral"])).rewrites()
    assert rewritten is not None
    assert "AVAILABLE_TOOLS" in rewritten
    assert "tools" in rewritten


@pytest.mark.parametrize(
    "content", ["m['content'].split('</think>')[-1].lstrip()", "m['content'].split('</think>')[-1] | trim"]
)
def test_removed_thinking_is_reported(content: str) -> None:
    tokenizer = talking_tokenizer(CHAT_FAMILIES["chatml"])
    template = CHAT_FAMILIES["chatml"].template
    tokenizer.chat_template = template.replace(
        "m['content']", f"({content} if m['role'] == 'assistant' else m.content)"
    )
    rewritten = Bridge(tokenizer).rewrites()
    assert rewritten is not None
    assert "<think>" in rewritten


def test_episodes_do_not_depend_on_each_other(chatml: Talk) -> None:
    together = chatml.play(6)
    alone = [chatml.play(1, first_seed=seed)[0] for seed in range(6)]
    assert [(e.tokens, e.mask) for e in together] == [(e.tokens, e.mask) for e in alone]


def test_a_cut_answer_gets_its_end_from_the_template(chatml: Talk) -> None:
    cut = 0
    for episode in chatml.play(max_turn_length=4):
        end = chatml.tokenizer.eos_token_id
        first_told = [i for i in range(1, len(episode.mask)) if episode.mask[i - 1] and not episode.mask[i]]
        for i in first_told:
            was_cut = episode.tokens[i - 1] != end
            assert (episode.tokens[i] == end) == was_cut
            assert not was_cut or episode.mask[i - 4 : i] == [True] * 4
            cut += was_cut
    assert cut


def test_cut_answers_are_beginnings_of_longer_ones(chatml: Talk) -> None:
    for whole, cut in zip(chatml.play(turns=1), chatml.play(turns=1, max_turn_length=4), strict=True):
        assert cut.tokens == whole.tokens[:4]


def test_the_row_never_exceeds_its_limit(chatml: Talk) -> None:
    reasons = set()
    for limit in range(20, 60, 3):
        for episode in chatml.play(3, max_response=limit):
            assert len(episode.tokens) <= limit
            assert episode.mask[-1]  # what does not fit is not appended
            reasons.add(episode.stop_reason)
    assert "length" in reasons


def test_turns_are_limited(chatml: Talk) -> None:
    for episode in chatml.play(2, max_turns=3):
        assert (episode.turns, episode.stop_reason) == (3, "turns")


def test_the_time_of_an_episode_is_limited(chatml: Talk) -> None:
    class Slow(Counting):
        def step(self, answer: str) -> tuple[str | None, float, bool]:
            time.sleep(0.06)
            return super().step(answer)

    (episode,) = chatml.play(1, environment=Slow, timeout=0.1)
    assert (episode.turns, episode.stop_reason) == (2, "timeout")


def test_a_long_prompt_is_counted_and_not_played(chatml: Talk) -> None:
    (episode,) = chatml.play(1, max_prompt=10)
    assert (episode.turns, episode.stop_reason, episode.tokens) == (0, "prompt", [])


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "abcd...(truncated)..."), ("right", "...(truncated)...wxyz"), ("middle", "ab...(truncated)...yz")],
)
def test_long_texts_are_truncated(chatml: Talk, side: Any, text: str) -> None:
    class Long:
        def reset(self) -> None: ...
        def step(self, answer: str) -> tuple[str, float, bool]:
            return "abcdefghijklmnopqrstuvwxyz", 0.0, False

    (episode,) = chatml.play(1, environment=Long, max_turns=2, max_text=4, truncate_side=side)
    assert episode.messages[2]["content"] == text


class Restarting(TorchRollout):
    capabilities = replace(TORCH, continues_rows=False)


def test_each_answer_has_a_seed_where_positions_have_none(chatml: Talk) -> None:
    one_seed = chatml.play(3)
    rollout = Restarting(chatml.rollout.config)
    rollout.load_weights(chatml.oracle.named_parameters())
    chatml.rollout, original = rollout, chatml.rollout
    several = chatml.play(3)
    chatml.rollout = original
    for one, other in zip(one_seed, several, strict=True):
        first = one.mask.index(False)
        assert one.tokens[:first] == other.tokens[:first]  # a first answer is that of a run without environments
        assert one.tokens != other.tokens


def facts(episode: Episode) -> tuple[Any, ...]:
    return episode.prompt, episode.tokens, episode.mask, episode.rewards, episode.stop_reason, episode.messages


class Waves(TorchRollout):
    """A rollout without a stream of its own."""

    open_stream: Any = None


@pytest.mark.parametrize("kind", [TorchRollout, Waves])
def test_a_stream_plays_the_episodes_of_waves(chatml: Talk, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    class Uneven(Counting):
        """Ends after different numbers of turns, and fails to begin an episode with a short prompt limit."""

        def reset(self, limit: int, seed: int, row_seed: int) -> str:
            text = super().reset(2 + row_seed % limit, seed)
            return text + " and on" * 40 if row_seed == 3 else text

    rollout = kind(chatml.rollout.config)
    rollout.load_weights(chatml.oracle.named_parameters())
    monkeypatch.setattr(chatml, "rollout", rollout)
    waves, streamed = (
        chatml.play(9, 5, Uneven, max_turn_length=12, schedule=schedule) for schedule in ("waves", "stream")
    )
    assert {episode.stop_reason for episode in waves} == {"done", "prompt"}
    for wave, episode in zip(waves, streamed, strict=True):
        assert facts(wave) == facts(episode)
        assert episode.log_probs == pytest.approx(wave.log_probs, abs=ROUNDING)
        assert episode.num_recomputed == wave.num_recomputed


WAITING = """
import asyncio, os, time


class Game:
    def reset(self, limit, row_seed):
        self.number, self.turn = row_seed, 0
        return "Go."

    DEF step(self, answer):
        self.turn += 1
        if self.number == 1 and self.turn == 2:
            open("FILE", "w").close()
        if self.number == 0:
            while not os.path.exists("FILE"):
                SLEEP(0.01)
        return "On.", 1.0, self.turn == 2
"""


@pytest.mark.parametrize(
    ("define", "sleep", "workers"), [("def", "time.sleep", 2), ("async def", "await asyncio.sleep", 1)]
)
@pytest.mark.parametrize("schedule", ["waves", "stream"])
def test_a_slow_environment_holds_up_its_own_episode_only(
    chatml: Talk, tmp_path: Path, schedule: Schedule, define: str, sleep: str, workers: int
) -> None:
    """The first turn of one episode ends when another has begun its second turn, which waves do not let it."""
    file = tmp_path / "game.py"
    program = WAITING.replace("DEF", define).replace("SLEEP", sleep).replace("FILE", str(tmp_path / "flag"))
    file.write_text(textwrap.dedent(program))
    pool = EnvironmentPool(
        Spec((Source("", f"{file}:Game"),), {}, 2.0 if schedule == "waves" else 60.0, 120.0, []), workers
    )
    pool.spec = pool.spec.described(pool.check())
    first, *_, last = chatml.play(2, 2, pool, schedule=schedule)
    pool.close()
    assert last.stop_reason == "done"
    assert (first.stop_reason, first.turns) == (("error", 1) if schedule == "waves" else ("done", 2))
