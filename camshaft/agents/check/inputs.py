"""The data and the chat template in the check of an environment: rows, tokens of observations, and a row with its mask.

rows = read_rows_of(data, limit=10)                       # with the columns that `reset` receives
episode = check_template(report, Bridge(tokenizer), section)
for kind, text in mask_parts(episode, tokenizer): ...     # ("sampled", "5"), ("observation", "higher"), ...
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from camshaft.agents.bridge import Bridge
from camshaft.agents.calls import PolicyAnswer
from camshaft.agents.check.findings import Report
from camshaft.agents.check.scripted import Played
from camshaft.agents.environment import Message, Turn
from camshaft.agents.episode import Episode
from camshaft.agents.setup import episode_chat, num_tool_tokens
from camshaft.config.schema.agents import MultiTurnConfig
from camshaft.config.schema.data import DataConfig
from camshaft.data.chat import as_chat, check_prompt, encode, render
from camshaft.data.files import data_files
from camshaft.data.prompts import find_prompt_key, ground_truth
from camshaft.data.tables import read_rows
from camshaft.errors import BatchError, RolloutError

_LOCATION = "an episode of the check"


def read_rows_of(data: DataConfig, limit: int) -> list[dict[str, Any]]:
    """Return the first rows of the training files, with the columns that `reset` receives."""
    files = data_files(data.train_files or [])
    key, chat = find_prompt_key(files, data.prompt_key), episode_chat(data)
    table = read_rows(files, [key], None, limit)
    source = data.reward_fn_key
    return [
        {
            **row,
            "prompt": as_chat(check_prompt(row[key], table.location(number), key), chat),
            "ground_truth": ground_truth(row),
            "data_source": (row.get(source) if source else None) or "unknown",
            "extra_info": row.get("extra_info") or {},
        }
        for number, row in enumerate(table.rows)
    ]


def check_template(report: Report, bridge: Bridge, section: MultiTurnConfig) -> Episode | None:
    """Add what a chat template does with the episodes to a report. Return the row of one of them."""
    schemas = report.spec.schemas if report.spec is not None else {}
    if any(schemas.values()) and not num_tool_tokens(bridge, schemas):
        names = ", ".join(tool["function"]["name"] for tools in schemas.values() for tool in tools)
        report.findings.append(
            f"the chat template does not describe the tools {names} to the policy; set data.chat_template to one that "
            "reads 'tools'"
        )
    if changed := bridge.rewrites():
        report.notes.append(f"the chat template rewrites the history, which training appends to: {changed}")
    else:
        report.notes.append("the chat template appends to the history")
    report.findings += _long_observations(report, bridge, section)
    whole = [played for played in report.episodes.values() if played.fault is None]
    if not whole:
        return None
    shown = max(whole, key=lambda played: min(3, len(played.answers)))
    try:
        return make_row(shown, bridge, schemas.get(shown.start.name, ()))
    except (BatchError, RolloutError) as error:
        report.findings.append(str(error))
        return None


def _long_observations(report: Report, bridge: Bridge, section: MultiTurnConfig) -> Iterator[str]:
    """Yield a sentence if observations are truncated, and add the longest one to the notes."""
    texts = [
        message["content"]
        for played in report.episodes.values()
        for turn in played.replies[1:]
        for message in turn.messages
        if isinstance(message["content"], str)
    ]
    if not texts:
        return
    lengths = [len(ids) for ids in encode(texts, bridge.tokenizer, special_tokens=False)]
    limit = section.max_tool_response_length
    report.notes.append(f"the longest observation has {max(lengths)} tokens")
    if limit is not None and max(lengths) > limit:
        count = sum(length > limit for length in lengths)
        yield (
            f"{count} of {len(lengths)} observations are truncated: the longest has {max(lengths)} tokens, and "
            f"max_tool_response_length is {limit}; increase it, or shorten what the environment says"
        )


def make_row(played: Played, bridge: Bridge, tools: Sequence[Mapping[str, Any]]) -> Episode:
    """Return an episode as tokens, as if the policy had sampled the answers."""
    first, *turns = played.replies
    episode = Episode(first.prompt(list(played.start.row["prompt"])))
    episode.prompt = bridge.start(episode.messages, tools)
    for answer, turn in zip(played.answers, turns, strict=False):
        message = _message(answer)
        ids = _answer_tokens(episode.messages, message, bridge, tools)
        calls = message.get("tool_calls", ())
        episode.add_answer(ids, [0.0] * len(ids), message["content"], **({"tool_calls": calls} if calls else {}))
        if _goes_on(turn):
            stopped = bridge.ends_answer(ids[-1])
            episode.add_told(bridge.after(turn.messages, stopped, tools, calls), turn.messages)
    return episode


def _goes_on(turn: Turn) -> bool:
    return not turn.done and bool(turn.messages)


def _message(answer: str | PolicyAnswer) -> Message:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    calls = [call.message(answer.turn, number) for number, call in enumerate(answer.calls)]
    return {"role": "assistant", "content": answer.text, **({"tool_calls": calls} if calls else {})}


def _answer_tokens(
    history: Sequence[Message], answer: Message, bridge: Bridge, tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the tokens of an answer as the template writes it, up to the token that ends it."""
    arguments = {**bridge.arguments, **({"tools": list(tools)} if tools else {})}
    prompt = render(list(history), bridge.tokenizer, _LOCATION, True, arguments)
    text = render([*history, answer], bridge.tokenizer, _LOCATION, False, arguments)
    text = text[len(prompt) :] if text.startswith(prompt) else answer["content"]
    ids = encode([text], bridge.tokenizer, special_tokens=False)[0]
    ends = [index for index, token in enumerate(ids) if bridge.ends_answer(token)]
    end: Any = bridge.tokenizer.eos_token_id
    return ids[: ends[-1] + 1] if ends else [*ids, end]


def mask_parts(episode: Episode, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a row: prompt, and then tokens that are sampled or an observation, with their texts."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    yield "prompt", decode(episode.prompt)
    for is_sampled, group in groupby(zip(episode.mask, episode.tokens, strict=True), lambda pair: pair[0]):
        yield "sampled" if is_sampled else "observation", decode([token for _, token in group])
