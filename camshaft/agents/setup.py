"""Environments of a run: load them once on the driver, and check the data for them.

spec, loaded = open_environments(section, passed)      # Spec for the ranks; columns that `reset` reads
check_environment_rows(loaded, spec, prompts)
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from camshaft.agents.bridge import Bridge
from camshaft.agents.calls import Call
from camshaft.agents.jobs import ProgramSpec
from camshaft.agents.messages import Loaded, Source, Spec, make_spec
from camshaft.agents.pool import EnvironmentPool
from camshaft.agents.programs import ProgramPool
from camshaft.config.schema.agents import MultiTurnConfig
from camshaft.config.schema.data import ChatTemplateConfig
from camshaft.dataproto import DataProto
from camshaft.errors import RolloutError
from camshaft.plugins import function_file
from camshaft.rewards.arguments import ENVIRONMENTS
from camshaft.rewards.messages import Spec as RewardSpec
from camshaft.subprocesses import import_path

ALWAYS_GIVEN = ("prompt", "ground_truth", "data_source", "extra_info")
"""Arguments of `reset` that are not columns which the data has to have."""

EPISODE_COLUMNS = (
    *("prompts", "sampling_seed", "raw_prompt", "data_row"),
    *("ground_truth", "data_source", "extra_info"),
)
"""Columns of the batch that a rollout with environments reads if they exist."""

ENVIRONMENT = "environment"
"""Column of the data file that selects an environment."""

TOOLS = "tools"
"""Column of the data file that selects tools."""

ToolSchemas = Mapping[str, tuple[dict[str, Any], ...]]

logger = logging.getLogger(__name__)


def open_environments(
    section: MultiTurnConfig,
    passed: Sequence[Source],
    output: Path | None = None,
    has_other_rewards: bool = False,
    rewards: RewardSpec | None = None,
) -> tuple[Spec | ProgramSpec, Loaded]:
    """Load the environments with tools, or the program, in a process, and return their description.

    `passed` are those from Python. With `has_other_rewards`, an environment with tools may have no score. `rewards` are
    the reward functions that are called with environments.
    """
    if section.agent is not None:
        spec, loaded = _open_program(section, passed, output)
        return with_rewards(spec, rewards), loaded
    spec = make_spec(section, passed, has_other_rewards)._replace(rewards=rewards)
    pool = EnvironmentPool(spec, 1, output)
    try:
        loaded = pool.check()
        return spec.described(loaded), loaded
    finally:
        pool.close()


def with_rewards(spec: Spec | ProgramSpec, rewards: RewardSpec | None) -> Spec | ProgramSpec:
    """Add the reward functions that are called with environments. Raise RolloutError if there are no environments."""
    if rewards is None or isinstance(spec, Spec):
        return spec if rewards is None else spec._replace(rewards=rewards)
    names = ", ".join(function.text for function in rewards.functions)
    raise RolloutError(
        f"the reward function {names} has a parameter '{ENVIRONMENTS}', but the program {spec.source.target} "
        f"(multi_turn.agent) has no environment that camshaft knows; remove the parameter '{ENVIRONMENTS}'"
    )


def _open_program(
    section: MultiTurnConfig, passed: Sequence[Source], output: Path | None
) -> tuple[ProgramSpec, Loaded]:
    target = section.agent or ""
    source = passed[0] if passed else Source("", target)
    file = function_file(target)
    path = import_path() if file is None else [str(Path(file).resolve().parent), *import_path()]
    limits = section.timeout, section.start_timeout, section.max_concurrency
    spec = ProgramSpec(source, *limits, list(dict.fromkeys(path)))
    pool = ProgramPool(spec, output)
    try:
        return spec, pool.check()
    finally:
        pool.close()


def data_columns(spec: Spec | ProgramSpec, loaded: Loaded) -> tuple[str, ...] | None:
    """Return the columns of the data file that the environments read; None for all columns."""
    if loaded.columns is None:
        return None
    columns = (*loaded.columns, *([ENVIRONMENT] if len(spec.sources) > 1 else []))
    return (*columns, *([TOOLS] if any(spec.schemas.values()) else []))


def join_columns(*columns: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the columns of several readers; None for all columns."""
    names: list[str] = []
    for part in columns:
        if part is None:
            return None
        names += part
    return tuple(dict.fromkeys(names))


def check_environment_rows(spec: Spec | ProgramSpec, loaded: Loaded, rows: DataProto) -> None:
    """Raise RolloutError if the data has no column for a parameter, or does not select an environment."""
    if not len(rows):
        return
    columns = set(rows["data_row"][0]) if "data_row" in rows else set[str]()
    for name in loaded.required:
        if name not in columns and name not in ALWAYS_GIVEN:
            raise RolloutError(
                f"{spec.reader} has a parameter '{name}', but the data has no column '{name}'. Add the column, rename "
                "the parameter, or give it a default"
            )
    if "data_row" in rows and any(spec.schemas.values()):
        for number, row in enumerate(rows["data_row"]):
            if row.get(TOOLS) is not None:
                check_tools(row[TOOLS], spec, f"row {number}")
    if len(spec.sources) > 1:
        names = [source.name for source in spec.sources]
        for number, row in enumerate(rows["data_row"]):
            if row.get(ENVIRONMENT) not in names:
                raise RolloutError(
                    f"row {number}: the column '{ENVIRONMENT}' is {row.get(ENVIRONMENT)!r}; it must be one of "
                    f"{', '.join(names)}"
                )


def check_tools(value: Any, spec: Spec | ProgramSpec, location: str) -> tuple[str, ...]:
    """Return the names in the column `tools` of a row: names, or JSON schemas of functions.

    Raise RolloutError if one is not a tool of the run.
    """
    items: Any = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    items = [item.strip() for item in items.split(",")] if isinstance(items, str) else items
    names = [item["function"]["name"] if isinstance(item, Mapping) else str(item) for item in items]
    known = {schema["function"]["name"] for schemas in spec.schemas.values() for schema in schemas}
    for name in names:
        if name not in known:
            choices = ", ".join(sorted(known))
            raise RolloutError(f"{location}: the column '{TOOLS}' contains '{name}'; the tools are {choices}")
    return tuple(names)


_RESULT = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "x"}


def report_template(tokenizer: Any, arguments: Mapping[str, Any], schemas: ToolSchemas, call_format: str) -> int:
    """Raise an error if the chat template cannot continue a conversation, and log what it changes in a history.

    `schemas` are those of the tools of each environment. Return the largest number of tokens that describe them.
    """
    bridge = Bridge(tokenizer, arguments, call_format)
    bridge.parser  # noqa: B018 - an unknown format is an error
    added = num_tool_tokens(bridge, schemas)
    tools = next((tools for tools in schemas.values() if tools), ())
    if tools:
        name = tools[0]["function"]["name"]
        call = Call(name, {"a": "x"}).message(0, 0)
        bridge.after([_RESULT | {"name": name, "tool_call_id": call["id"]}], True, tools, [call])
        if not added:
            logger.warning(
                "the chat template does not describe the tools %s to the policy; set data.chat_template to one that "
                "reads 'tools'",
                ", ".join(schema["function"]["name"] for schema in tools),
            )
    else:
        bridge.after([{"role": "user", "content": "x"}], stopped=True)
    if changed := bridge.rewrites():
        logger.warning(
            "the chat template rewrites the history of a conversation: %s. In training, the history contains what was "
            "sampled; a chat server that formats each request with the template shows the model another one",
            changed,
        )
    return added


def num_tool_tokens(bridge: Bridge, schemas: ToolSchemas) -> int:
    """Return the largest number of tokens with which the chat template describes the tools of an environment."""
    messages = [{"role": "user", "content": "x"}]
    counts = [len(bridge.start(messages, tools)) for tools in schemas.values() if tools]
    return max(counts) - len(bridge.start(messages)) if counts else 0


def episode_chat(data: ChatTemplateConfig) -> ChatTemplateConfig:
    """Return the chat options of a run with environments, in which a plain-text prompt is a user message."""
    return data.model_copy(update={"prompt_template": data.prompt_template or "{prompt}", "tools_key": None})


def episode_inputs(batch: DataProto, divisor: int) -> tuple[DataProto, int]:
    """Return the columns that a rollout with environments reads, padded, and the number of padding rows.

    The column `environment_seed` is the sampling seed of the first row with the same prompt. `is_padding` is true in
    padding rows, which are not played.
    """
    first: dict[Any, int] = {}
    pairs = zip(batch["uid"], batch["sampling_seed"].tolist(), strict=True)
    seeds = [first.setdefault(uid, seed) for uid, seed in pairs]
    inputs = batch.select(*(name for name in EPISODE_COLUMNS if name in batch))
    rows, count = inputs.with_columns(environment_seed=torch.tensor(seeds)).pad_to_divisor(divisor)
    return rows.with_columns(is_padding=torch.arange(len(rows)) >= len(rows) - count), count
