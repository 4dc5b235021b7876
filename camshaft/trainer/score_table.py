"""mean@n, best@k and the others of each data set as a table; used by `camshaft generate` and `camshaft eval`.

console.print(score_table(at_n_metrics(rows)))
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table


def score_table(metrics: Mapping[str, float]) -> Table:
    """A row each for mean@n, best@k and the others, a column for each data set."""
    values: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        source, _, kind = name.partition("/")[2].rpartition("/reward/")
        values.setdefault(kind.removesuffix("/mean"), {})[source] = value
    sources = list(dict.fromkeys(source for row in values.values() for source in row))
    table = Table("", *sources)
    for kind in sorted(values, key=_in_order):
        table.add_row(kind, *(f"{values[kind][source]:.4g}" if source in values[kind] else "-" for source in sources))
    return table


def _in_order(kind: str) -> tuple[int, int]:
    name, _, k = kind.partition("@")
    return ("mean", "std", "pass", "best", "maj", "worst").index(name), int(k)
