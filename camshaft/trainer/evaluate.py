"""Score responses in files for `camshaft eval`, and format the scores as a table.

    metrics = evaluate(config)          # val-core/<data_source>/reward/mean@n, test_score/<data_source>, ...

The metrics are those of validation (`validate.py`) and `pass@k`.
"""

import json
from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.markup import escape
from rich.table import Table

from camshaft import storage
from camshaft.algorithms.at_n import draw_sizes, pass_at
from camshaft.config import EvalConfig
from camshaft.data import data_files
from camshaft.data.answers import read_answers
from camshaft.errors import BatchError
from camshaft.masking import printable
from camshaft.trainer.scoring import build_answer_rewards, check_scorable
from camshaft.trainer.validate import ScoredResponse, at_n_metrics, group_by_prompt


def evaluate(config: EvalConfig) -> dict[str, float]:
    """Score the responses, write the requested files and return the metrics."""
    data, custom = config.data, config.custom_reward_function
    answers = read_answers(data_files(data.path), data)
    batch = answers.batch
    check_scorable(batch, custom)
    if data.output_path is not None:
        answers.check_columns(data.score_key)
    _check_response_counts([ScoredResponse(*row, 0.0) for row in zip(batch["data_source"], batch["uid"], strict=True)])
    with build_answer_rewards(custom) as rewards:
        rewards.check_rows(batch)
        result = rewards.score_texts(batch, answers.texts)
    columns_of_rows = (batch["data_source"], batch["uid"], result.scores.tolist(), result.answers, result.parts)
    rows = [ScoredResponse(*row) for row in zip(*columns_of_rows, strict=True)]
    groups = group_by_prompt(rows)
    metrics = {f"test_score/{name}": fmean(row.score for group in groups[name] for row in group) for name in groups}
    metrics |= at_n_metrics(rows) | pass_metrics(rows, data.pass_score)
    metrics |= {name: value for name, value in result.metrics.items() if not name.endswith("/mean")}
    if data.output_path is not None:
        answers.write(data.output_path, data.score_key, result.scores.tolist(), result.answers)
    if data.metrics_path is not None:
        with storage.new_file(data.metrics_path) as path:
            path.write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return metrics


def pass_metrics(rows: Sequence[ScoredResponse], threshold: float) -> dict[str, float]:
    """Compute `pass@k/mean` for k = 1, 2, 4, ..., n: the probability that one of k responses reaches `threshold`."""
    metrics: dict[str, float] = {}
    for source, groups in group_by_prompt(rows).items():
        n = len(groups[0])
        for k in sorted({1, *draw_sizes(n)}):
            section = "val-core" if k in (1, n) else "val-aux"
            probabilities = [pass_at([row.score for row in group], k, threshold) for group in groups]
            metrics[f"{section}/{source}/reward/pass@{k}/mean"] = fmean(probabilities)
    return metrics


def _check_response_counts(rows: Sequence[ScoredResponse]) -> None:
    """Raise BatchError unless all prompts of a data source have the same number of responses."""
    for source, groups in group_by_prompt(rows).items():
        sizes = {len(group): group[0].uid for group in groups}
        if len(sizes) > 1:
            (min_count, min_row), *_, (max_count, max_row) = sorted(sizes.items())
            raise BatchError(
                f"data_source {source}: row {min_row} has {min_count} responses, but row {max_row} has {max_count}. "
                "mean@n and similar metrics require the same number for every prompt; evaluate these rows separately"
            )


def score_table(metrics: Mapping[str, float]) -> Table:
    """Build a table with one row per metric (mean@n, best@k, ...) and one column per data source."""
    values: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        source, _, kind = name.partition("/")[2].rpartition("/reward/")
        values.setdefault(kind.removesuffix("/mean"), {})[source] = value
    sources = list(dict.fromkeys(source for row in values.values() for source in row))
    table = Table("", *(escape(printable(source)) for source in sources))
    for kind in sorted(values, key=_sort_key):
        table.add_row(kind, *(f"{values[kind][source]:.4g}" if source in values[kind] else "-" for source in sources))
    return table


def _sort_key(kind: str) -> tuple[int, int]:
    name, _, k = kind.partition("@")
    return ("mean", "std", "pass", "best", "maj", "worst").index(name), int(k)
