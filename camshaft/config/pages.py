"""The config as text to read: one key, the whole file of defaults, the reference page.

    explain("algorithm.kl_ctrl.kl_coef")      # camshaft config explain
    show("sft")                               # camshaft config show --trainer sft
    reference_page()                          # camshaft config docs

Meanings, types and bounds come from the schema, defaults and remarks from the YAML.
"""

import re
from functools import cache
from typing import Any

from camshaft.config.aliases import KEYS, older_names
from camshaft.config.loader import DEFAULTS, HOME, raw_defaults, resolved_defaults
from camshaft.config.not_yet import later
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section, describe
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.rm import RMConfig
from camshaft.config.schema.sft import SFTConfig
from camshaft.config.tree import as_section, fields, get, leaf_fields, nearest, shown
from camshaft.errors import ConfigError

SCHEMAS: dict[str, type[Section]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "generate": GenerateConfig,
    "eval": EvalConfig,
}

_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?P<value>.*)")


def explain(key: str, trainer: str = "ppo") -> str:
    """What a key means, what it takes and what it is by default; of a section, its keys."""
    schema = SCHEMAS[trainer]
    if KEYS.get(key) in fields(schema):
        return f"{key} is the older name of:\n\n{explain(KEYS[key], trainer)}"
    if key not in fields(schema):
        raise ConfigError(_unknown(key, trainer))
    section = as_section(fields(schema)[key])
    return _leaf(key, schema) if section is None else _section(key, section, schema)


def show(trainer: str = "ppo") -> str:
    """The file of defaults with its comments."""
    return _file(SCHEMAS[trainer]).rstrip("\n")


def reference_page() -> str:
    """Every key of all commands as Markdown."""
    parts = ["# Config reference\n", "Written by `camshaft config docs`.\n"]
    for trainer, schema in SCHEMAS.items():
        parts.append(f"## `camshaft {trainer}`\n")
        parts.append("| key | default | takes | meaning |\n|---|---|---|---|")
        for key, field in leaf_fields(schema).items():
            note = later(key)
            meaning = (field.description or "") + (f" ({note})" if note else "")
            cells = [f"`{key}`", f"`{_default(key, schema)}`", describe(field), meaning]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _leaf(key: str, schema: type[Section]) -> str:
    field = fields(schema)[key]
    rows = [("takes", describe(field)), ("default", _default(key, schema))]
    value = shown(get(resolved_defaults(schema), key))
    if value != rows[-1][1]:
        rows.append(("that is", value))
    rows += [("remark", remark) for remark in [comments(schema).get(key)] if remark]
    rows += [("older name", older) for older in older_names(key)]
    rows += [("note", note) for note in [later(key)] if note]
    return "\n".join([key, f"  {field.description}", "", *(f"  {name:<10}  {text}" for name, text in rows)])


def _section(key: str, section: type[Section], schema: type[Section]) -> str:
    lines = [key, f"  {fields(schema)[key].description}", ""]
    width = max(len(name) for name in section.model_fields)
    for name, field in section.model_fields.items():
        lines.append(f"  {name:<{width}}  {field.description}")
    return "\n".join(lines)


def _unknown(key: str, trainer: str) -> str:
    close = nearest(key, fields(SCHEMAS[trainer]), limit=4)
    hint = f" Nearest: {', '.join(close)}." if close else ""
    other = next((name for name, schema in SCHEMAS.items() if key in fields(schema)), None)
    elsewhere = "" if other is None else f" `camshaft {other}` has it: add --trainer {other}."
    sections = ", ".join(SCHEMAS[trainer].model_fields)
    return f"there is no key '{key}' in the config of `camshaft {trainer}`.{elsewhere}{hint} It begins with: {sections}"


def _default(key: str, schema: type[Section]) -> str:
    """As it is written in the YAML."""
    value: Any = get(raw_defaults(schema), key)
    return shown(value)


@cache
def _file(schema: type[Section]) -> str:
    return (HOME / f"{DEFAULTS[schema]}.yaml").read_text(encoding="utf-8")


@cache
def comments(schema: type[Section]) -> dict[str, str]:
    """Key -> what the YAML remarks on it: the comment lines right above, and the one behind the value."""
    found: dict[str, str] = {}
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in _file(schema).splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.strip(" #"))
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            above = []
            continue
        indent = len(match["indent"])
        path = [(depth, name) for depth, name in path if depth < indent] + [(indent, match["key"])]
        _, _, behind = match["value"].partition(" # ")
        text = " ".join([*above, *([behind.strip()] if behind else [])])
        if text:
            found[".".join(name for _, name in path)] = text
        above = []
    return found
