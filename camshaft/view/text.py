"""Tables of runs, responses and differences for a terminal.

    print(runs_table(find_runs("checkpoints"), now=time.time()))
    print(show_step(run, step=12, num_groups=4, width=120))
    print(show_generated(Path("responses.parquet"), num_groups=4, width=120))
    print(compare(first, second))

Texts of responses are escaped, so that they cannot control the terminal.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from camshaft.tracking.console import format_number
from camshaft.tracking.run_folder import RunFolder, RunFolderError, read_samples
from camshaft.view.differences import differing_keys, key_columns, missing_keys
from camshaft.view.panels import HEADLINES, LABELS, REWARD, VALIDATION, first_logged


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Align the columns of a table. The last column is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(indent + "  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def runs_table(runs: Sequence[RunFolder], now: float) -> str:
    """Return one line per run: differing config keys, state, step, phase and its age, reward and validation."""
    for run in runs:
        run.metrics.poll()
    progress = [first_logged(REWARD, run.metrics.names) for run in runs]
    labels = list(dict.fromkeys(LABELS[name] for name in progress if name)) or ["reward"]
    columns = key_columns(runs)
    rows = [("run", *columns, "state", "step", "phase", "for", " or ".join(labels), "validation")]
    for index, (run, name) in enumerate(zip(runs, progress, strict=True)):
        info, status, state, names = run.info(), run.status(), run.state(), run.metrics.names
        in_progress = status is not None and state in ("running", "killed")
        rows.append(
            (
                printable(str(run.path)),
                *(printable(cells[index]) for cells in columns.values()),
                state,
                f"{run.metrics.last_step}" + (f"/{total}" if (total := info.get("total_steps", "?")) else ""),
                printable(status.phase) if status and in_progress else "",
                format_age(now - status.since) if status and state == "running" else "",
                f"{LABELS[name]} {_last(run, name)}" if name and len(labels) > 1 else _last(run, name),
                _last(run, first_logged(VALIDATION, names)),
            )
        )
    return table(rows)


def _last(run: RunFolder, name: str | None) -> str:
    value = None if name is None else run.metrics.last(name)
    return "" if value is None else format_number(value)


def show_step(run: RunFolder, step: int, num_groups: int, width: int, uid: str | None = None) -> str:
    """Return the responses of a step by group: the group `uid`, or the groups with the largest spread of scores."""
    columns = ["uid", "data_source", "prompt", "response", "ground_truth", "score", "advantage", "response_tokens"]
    rows = run.samples(step, [*columns, "finished", "failure", "messages", "stop_reason"]).to_pylist()
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append(row)
    scores = [row["score"] for row in rows]
    lines = [
        f"step {step}: {len(rows)} responses in {len(groups)} groups, score {format_number(sum(scores) / len(scores))} "
        f"(lowest {format_number(min(scores))}, highest {format_number(max(scores))})",
        f"cut at the length limit: {sum(not row['finished'] for row in rows)}; "
        f"failed reward calls: {sum(row['failure'] is not None for row in rows)}; "
        f"groups without signal: {sum(len(group) > 1 and _spread(group) == 0 for group in groups.values())}",
    ]
    if uid is not None:
        shown = [groups[uid]] if uid in groups else []
        lines += [] if shown else [f"no response has the uid {uid}; uids of this step: {', '.join(list(groups)[:10])}"]
    else:
        shown = sorted(groups.values(), key=_spread, reverse=True)[:num_groups]
    for group in shown:
        lines += ["", *_group_lines(group, width)]
    if len(shown) < len(groups):
        lines += ["", f"{len(groups) - len(shown)} more groups; --groups {len(groups)} shows all, --uid shows one"]
    return "\n".join(lines)


def show_generated(path: Path, num_groups: int, width: int) -> str:
    """Return the responses in the first rows of an output file of `camshaft generate`."""
    table_of_rows = read_samples(path)
    suffix = "_finished"
    names = table_of_rows.column_names
    keys = [key for name in names if (key := name.removesuffix(suffix)) != name and key in names]
    if not keys:
        raise RunFolderError(
            f"{path} has no column that ends with {suffix}, so it is not an output file of `camshaft generate`"
        )
    added = tuple(f"{key}_" for key in keys)
    lines = [f"{path}: {len(table_of_rows)} rows"]
    for row in table_of_rows.slice(0, num_groups).to_pylist():
        inputs = {name: value for name, value in row.items() if name not in keys and not name.startswith(added)}
        lines += ["", *(f"{name}: {printable(_content(value))}" for name, value in inputs.items())]
        for key in keys:
            scores = row.get(f"{key}_score") or [None] * len(row[key])
            cells = [("score", "tokens", "", key)]
            columns = zip(scores, row[f"{key}_tokens"], row[f"{key}{suffix}"], row[key], strict=True)
            for score, tokens, finished, text in columns:
                number = "-" if score is None else format_number(score)
                cells.append((number, str(tokens), "" if finished else "cut", printable(text)))
            lines += table(cells, indent="  ").splitlines()
    if num_groups < len(table_of_rows):
        lines += ["", f"{len(table_of_rows) - num_groups} more rows; --groups {len(table_of_rows)} shows all"]
    return "\n".join(_fit(line, width) for line in lines)


def _fit(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def _content(value: Any) -> str:
    """Return the text of messages, or of another value."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "content" in item for item in value):
        return "  ".join(f"{message.get('role', '')}: {message['content']}" for message in value)
    return str(value)


def _group_lines(group: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    first = group[0]
    head = printable(first["uid"])
    if first["data_source"] != "unknown":
        head += f" ({printable(first['data_source'])})"
    if first["ground_truth"] not in (None, "null"):
        head += f"  truth: {printable(first['ground_truth'])}"
    cells = [("score", "advantage", "tokens", "", "response")]
    for row in sorted(group, key=lambda row: -row["score"]):
        end = row.get("stop_reason") or ("done" if row["finished"] else "cut")
        notes = [note for note in (row["failure"], None if end == "done" else end) if note]
        numbers = (format_number(row["score"]), format_number(row["advantage"]), str(row["response_tokens"]))
        text = conversation(row["messages"]) if row.get("messages") else row["response"]
        cells.append((*numbers, " ".join(notes), printable(text)))
    lines = [head, f"prompt: {printable(first['prompt'])}", *table(cells, indent="  ").splitlines()]
    if len(group) > 1 and _spread(group) == 0:
        lines.append("  all scores are equal: no signal for a group-relative advantage")
    return [_fit(line, width) for line in lines]


def conversation(messages: str) -> str:
    """Return the messages of an episode, given as JSON, from the first answer on, with the rewards of answers."""
    rows = json.loads(messages)
    first = next((i for i, row in enumerate(rows) if row["role"] == "assistant"), len(rows))
    parts = []
    for row in rows[first:]:
        reward = f" ({format_number(row['reward'])})" if row.get("reward") else ""
        start = f"[row {row['row']}]  " if "row" in row else ""  # of a session with several rows
        parts.append(f"{start}{row['role']}{reward}: {row['content']}")
    return "  ".join(parts)


def _spread(group: Sequence[Mapping[str, Any]]) -> float:
    scores = [row["score"] for row in group]
    return max(scores) - min(scores)


def compare(*runs: RunFolder) -> str:
    """Return the differences of runs: state, versions, config, and metrics at their last common step."""
    names, configs = [run.name for run in runs], [run.config() for run in runs]
    parts = [table([("", *names), *_facts(runs)])]
    if differences := differing_keys(configs):
        rows = [(key, *(_config_text(value) for value in values)) for key, values in differences.items()]
        parts.append(table([("config", *names), *rows]))
    elif all(configs):
        parts.append("The configs are equal.")
    if without := [number for number, config in enumerate(configs) if not config]:
        owner = names[without[0]] if without[0] else "The first run"
        parts.append(f"{owner} has no run.json with its config.")
    elif missing := missing_keys(configs):
        commands = ", ".join(dict.fromkeys(str(run.info().get("command")) for run in runs))
        parts.append(f"{len(missing)} keys are in the configs of some runs only (commands: {commands}).")
    for run in runs:
        run.metrics.poll()
    common = sorted(set.intersection(*(set(run.metrics.steps) for run in runs)))
    if not common:
        return "\n\n".join([*parts, "The runs have no step in common."])
    rows = [_metric_row(name, runs, common[-1]) for name in HEADLINES]
    heading = (f"metrics up to step {common[-1]}", *names, *(["difference"] if len(runs) == 2 else []))
    return "\n\n".join([*parts, table([heading, *filter(None, rows)])])


def _facts(runs: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    """Return the state of each run, and host, length and versions if they differ."""
    infos = [run.info() for run in runs]
    versions = [info.get("versions", {}) | {"camshaft": info.get("version", "")} for info in infos]
    facts = {name.replace("_", " "): [info.get(name, "") for info in infos] for name in ("host", "total_steps")}
    for name in dict.fromkeys(name for version in versions for name in version):
        facts[f"version of {name}"] = [version.get(name, "") for version in versions]
    differing = {name: values for name, values in facts.items() if any(value != values[0] for value in values)}
    rows = {"state": [run.state() for run in runs], **differing}
    return [(name, *map(str, values)) for name, values in rows.items()]


def _metric_row(name: str, runs: Sequence[RunFolder], step: int) -> tuple[str, ...] | None:
    """Return the last values of a metric up to a step, or None if fewer than two runs have logged it."""
    values = []
    for run in runs:
        steps, logged = run.metrics.series(name)
        values.append(
            next((value for at, value in zip(reversed(steps), reversed(logged), strict=True) if at <= step), None)
        )
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    cells = ["-" if value is None else format_number(value) for value in values]
    return (name, *cells, *([f"{known[1] - known[0]:+.4g}"] if len(runs) == 2 else []))


def _config_text(value: Any) -> str:
    return "-" if value is None else printable(str(value))


def printable(text: str) -> str:
    """Return text on one line, with control characters as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def format_age(seconds: float) -> str:
    """Format a duration with its largest unit."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{math.floor(seconds / length)} {name}"
    return f"{max(0, math.floor(seconds))} s"
