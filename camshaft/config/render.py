"""Render descriptions of config keys, the reference page, the table of batch sizes, and configs without secrets.

    explain("algorithm.kl_ctrl.kl_coef")                # camshaft config explain
    explain("learning rate")                            # searches the descriptions
    show("sft")                                         # camshaft config show --trainer sft
    reference_page()                                    # camshaft config docs
    render_batch_table(batch_table(config, topology))   # logged at the start of an RL run
    without_secrets(config)                             # for trackers, checkpoints and response files

Descriptions, types, bounds, defaults and the order of keys are read from the schema.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from camshaft.config.defaults import raw_defaults
from camshaft.config.derive import MicroBatch, Pass, micro_batch, pass_limits
from camshaft.config.foreign.answers import answer
from camshaft.config.foreign.answers import rows as foreign_rows
from camshaft.config.foreign.topics import topic_of_key, topic_of_name
from camshaft.config.layout import Topology, divide_evenly
from camshaft.config.load import NOT_IMPLEMENTED, resolved_defaults
from camshaft.config.schema.aliases import ALIASES
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section, describe
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import ActorConfig, CriticConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig
from camshaft.config.short_names import declared_short_names, short_names
from camshaft.config.tree import (
    fields,
    flatten,
    format_value,
    get,
    leaf_fields,
    nearest_keys,
    ordered_names,
    put,
    section_class,
)
from camshaft.errors import ConfigError
from camshaft.masking import mask_value

# -- keys -----------------------------------------------------------------------------------------

SCHEMAS: dict[str, type[Section]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "generate": GenerateConfig,
    "eval": EvalConfig,
}

MAX_FOUND = 20
"""Largest number of keys that a search lists."""

_HEADER = """\
# Defaults of camshaft {trainer}. To see the description, type and bounds of a key:
#   camshaft config explain {option}KEY
#
# Override a value on the command line (trainer.seed=7), or in a config file that is selected with
# --config-dir FOLDER --config-name NAME and contains only the keys that differ.

"""


def explain(key: str, trainer: str = "ppo") -> str:
    """Describe a key with its type and its default, or all keys of a section.

    Any other text is searched in the names and descriptions of the keys.
    """
    schema = SCHEMAS[trainer]
    if key in short_names(schema) and key not in fields(schema):
        name = short_names(schema)[key]
        return f"{key} is short for:\n\n{explain(name, trainer)}"
    if ALIASES.get(key) in fields(schema):
        return f"{key} is an alias of:\n\n{explain(ALIASES[key], trainer)}"
    if key not in fields(schema):
        if found := {} if "." in key else search(key, schema):
            return _found(key, found, schema)
        raise ConfigError(_unknown(key, trainer))
    section = section_class(fields(schema)[key])
    return _leaf(key, schema) if section is None else _section(key, section, schema)


def search(text: str, schema: type[Section]) -> dict[str, str]:
    """Return the keys whose names and descriptions contain words that start with each word of a text.

    Each key has the first sentence of its description. Keys whose names contain the words come first.
    """
    words = re.findall(r"[^\W_]+", text.lower())
    patterns = [re.compile(rf"(?<![^\W_]){word}") for word in words]
    ranked: list[tuple[int, str, str]] = []
    for key, field in leaf_fields(schema).items():
        first, _, rest = (field.description or "").partition(". ")
        texts = [key, f"{key} {first}", f"{key} {first} {rest}"]
        matching = [all(pattern.search(part.lower()) for pattern in patterns) for part in texts]
        if any(matching) and words:
            ranked.append((matching.index(True), key, first.removesuffix(".")))
    return {key: sentence for _, key, sentence in sorted(ranked, key=lambda entry: entry[0])}


def _found(text: str, found: Mapping[str, str], schema: type[Section]) -> str:
    names = declared_short_names(schema)
    shown = [(f"{key} ({names[key].name}=)" if key in names else key, found[key]) for key in list(found)[:MAX_FOUND]]
    lines = [f"no key is called '{text}'; {len(found)} keys or their descriptions contain it:"]
    lines += [f"  {key}\n      {sentence}" for key, sentence in shown]
    more = len(found) - len(shown)
    return "\n".join([*lines, *([f"  and {more} more; add a word to narrow the search"] if more else [])])


def show(trainer: str = "ppo") -> str:
    """Return the defaults as YAML. The first sentence of each description follows the value as a comment."""
    schema, option = SCHEMAS[trainer], "" if trainer == "ppo" else f"--trainer {trainer} "
    return _HEADER.format(trainer=trainer, option=option) + "\n".join(_lines(schema, raw_defaults(schema), ""))


def _lines(section: type[Section], values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name in ordered_names(section):
        field = section.model_fields[name]
        kind = section_class(field)
        value = "" if kind else f" {format_value(values[name])}"
        yield f"{indent}{name}:{value} # {(field.description or '').partition('. ')[0].removesuffix('.')}"
        if kind is not None:
            yield from _lines(kind, values[name], f"{indent}  ")


def reference_page() -> str:
    """Return a Markdown page that describes the config keys of all commands."""
    parts = ["# Config reference\n", "Generated by `camshaft config docs`.\n"]
    for trainer, schema in SCHEMAS.items():
        parts.append(f"## `camshaft {trainer}`\n")
        parts.append("| short name | key | value |\n|---|---|---|")
        parts += [
            f"| `{entry.name}` | `{key}` | {entry.values} |" for key, entry in declared_short_names(schema).items()
        ]
        parts.append("")
        parts.append("| key | default | type | description |\n|---|---|---|---|")
        for key in flatten(raw_defaults(schema), leaf_fields(schema)):
            field = leaf_fields(schema)[key]
            note = " (some values are not implemented)" if _has_unimplemented_values(key) else ""
            description = (field.description or "") + note
            cells = [f"`{key}`", f"`{format_value(get(raw_defaults(schema), key))}`", describe(field), description]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _leaf(key: str, schema: type[Section]) -> str:
    field = fields(schema)[key]
    rows = [("type", describe(field)), ("default", format_value(get(raw_defaults(schema), key)))]
    value = format_value(get(resolved_defaults(schema), key))
    if value != rows[-1][1]:
        rows.append(("resolved", value))
    rows += [("short name", name) for name, target in short_names(schema).items() if target == key]
    rows += [("alias", alias) for alias, name in ALIASES.items() if name == key]
    rows += [("note", "some values are not implemented")] if _has_unimplemented_values(key) else []
    return "\n".join([key, _wrap(field.description), "", *(f"  {name:<10}  {text}" for name, text in rows)])


def _section(key: str, section: type[Section], schema: type[Section]) -> str:
    lines = [key, _wrap(fields(schema)[key].description), ""]
    width = max(len(name) for name in section.model_fields)
    for name in ordered_names(section):
        lines.append(_wrap(section.model_fields[name].description, f"  {name:<{width}}  "))
    if key in short_names(schema):
        lines += ["", f"{key}=<value>, with a value that is not a section, is short for {short_names(schema)[key]}."]
    return "\n".join(lines)


def _wrap(description: str | None, label: str = "  ") -> str:
    """Wrap a description to 120 columns after `label`, and indent the following lines by its length."""
    return textwrap.fill(
        description or "",
        120,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _unknown(key: str, trainer: str) -> str:
    word = key.replace(" ", "_")
    if (topic := topic_of_key(word) or topic_of_name(word)) is not None:
        return topic.message()
    if word in foreign_rows(SCHEMAS[trainer]):
        return f"'{key}' is not a config key of `camshaft {trainer}`: {answer(word, None, SCHEMAS[trainer])}"
    suggestions = nearest_keys(key, fields(SCHEMAS[trainer]), limit=4)
    hint = f" Nearest: {', '.join(suggestions)}." if suggestions else ""
    other = next((name for name, schema in SCHEMAS.items() if key in fields(schema)), None)
    note = "" if other is None else f" It is a key of `camshaft {other}`; add --trainer {other}."
    sections = ", ".join(SCHEMAS[trainer].model_fields)
    return f"'{key}' is not a config key of `camshaft {trainer}`.{note}{hint} Sections: {sections}"


def _has_unimplemented_values(key: str) -> bool:
    """Return True if the schema accepts values of the key that are not implemented."""
    return any(key in entry.keys for entry in NOT_IMPLEMENTED)


# -- batch sizes ----------------------------------------------------------------------------------

RANKS = "data-parallel ranks"
FORWARD = "forward micro-batch per rank"
_ROWS = {
    RANKS: "ranks / (sequence x tensor parallel)",
    "prompts per iteration": "data.train_batch_size",
    "sequences per iteration": "prompts x rollout.n",
    "sequences per mini-batch": "ppo_mini_batch_size x rollout.n",
    "mini-batches per epoch": "sequences / mini-batch",
    "mini-batch per rank": "sequences per mini-batch / data-parallel ranks",
    "micro-batch per rank": "one forward and backward pass",
    "micro-batches per mini-batch": "passes per rank and optimizer step",
    FORWARD: "one pass for log-probs, values or scores",
    "epochs": "ppo_epochs",
    "optimizer steps per iteration": "mini-batches x epochs",
}
"""Names of the table rows, with the formula or the explanation of each row."""


@dataclass(frozen=True)
class BatchRow:
    """A row of the table: its name, the value of each role (None if it does not apply), and its formula."""

    name: str
    actor: int | str
    ref: int | str | None
    critic: int | str | None
    reward: int | str | None
    formula: str


def batch_table(config: PPOConfig, topology: Topology) -> list[BatchRow]:
    """Return the batch sizes of each role, from the prompts of an iteration to the micro-batches on each rank.

    An iteration generates several sequences per prompt. The sequences are split into mini-batches, one per optimizer
    step, and each rank splits its share of a mini-batch into micro-batches, one per forward pass. The columns of the
    reference and the reward model are empty if the run has no separate engine for them. `config` must be valid.
    """
    actor = _column(config, topology, config.actor_rollout_ref.actor, "actor", "old_log_prob")
    ref: dict[str, int | str] = {}
    if config.kl_plan().needs_model:
        ref = {RANKS: config.ref_dp_size(topology), FORWARD: _size(micro_batch(config, topology, "ref"))}
    critic: dict[str, int | str] = {}
    if config.needs_critic():
        critic = _column(config, topology, config.critic, "critic", "values")
    reward: dict[str, int | str] = {}
    if config.needs_reward_engine():
        reward = {RANKS: config.reward_dp_size(topology), FORWARD: _size(micro_batch(config, topology, "reward"))}
    return [
        BatchRow(name, actor[name], ref.get(name), critic.get(name), reward.get(name), formula)
        for name, formula in _ROWS.items()
    ]


def render_batch_table(rows: Sequence[BatchRow]) -> str:
    """Format the table as aligned text."""
    cells = [("", "actor", "ref", "critic", "reward", "")]
    cells += [
        (row.name, _cell(row.actor), _cell(row.ref), _cell(row.critic), _cell(row.reward), row.formula) for row in rows
    ]
    if all(row.reward is None for row in rows):
        cells = [(*cell[:4], cell[5]) for cell in cells]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]) - 1)]
    lines = [
        "  ".join([f"{name:<{widths[0]}}", *(f"{n:>{w}}" for n, w in zip(numbers, widths[1:], strict=True)), formula])
        for name, *numbers, formula in cells
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cell(number: int | str | None) -> str:
    return "-" if number is None else str(number)


def _column(
    config: PPOConfig, topology: Topology, section: ActorConfig | CriticConfig, train: Pass, infer: Pass
) -> dict[str, int | str]:
    """Return the rows of a trained role."""
    n, prompts = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    mini_prompts = section.ppo_mini_batch_size
    dp_size, size = pass_limits(config)[train].dp_size(topology), micro_batch(config, topology, train)
    mini_per_rank = divide_evenly(mini_prompts * n, dp_size, "mini-batch")
    mini_batches = prompts // mini_prompts
    values = [
        dp_size,
        prompts,
        prompts * n,
        mini_prompts * n,
        mini_batches,
        mini_per_rank,
        _size(size),
        "by tokens" if size.sequences is None else -(-mini_per_rank // size.sequences),
        _size(micro_batch(config, topology, infer)),
        section.ppo_epochs,
        mini_batches * section.ppo_epochs,
    ]
    return dict(zip(_ROWS, values, strict=True))


def _size(micro: MicroBatch) -> int | str:
    return f"{micro.tokens} tokens" if micro.sequences is None else micro.sequences


# -- secrets --------------------------------------------------------------------------------------


def without_secrets(config: Section) -> dict[str, Any]:
    """Return the config as a nested dict in which possible secrets are replaced by `***`.

    `ray_kwargs` is omitted, because it can contain environment variables and cluster passwords. `masking.py` describes
    the other secrets.
    """
    values: dict[str, Any] = {}
    for key, value in flatten(config.model_dump(mode="json"), leaf_fields(type(config))).items():
        if not key.startswith("ray_kwargs"):
            put(values, key, mask_value(value))
    return values
