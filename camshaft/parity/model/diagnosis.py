"""Finds the change of the oracle, or the leak between rows, that explains the outputs of an engine.

diagnose_model      log-probs of single rows: tries the variants of `changes.py`
diagnose_packing    log-probs that depend on the other rows of a batch
diagnose_gradients  gradients of an engine whose log-probs are right
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from camshaft.parity.model.changes import Family, changes, families
from camshaft.parity.model.oracle import Change, Oracle, Weights

GRID, GOLDEN_STEPS = 25, 40
"""Numbers of values that the search of a family tries before and during a golden-section search."""
EXACT = 1e-4
"""Fraction of the difference that may remain with a number that a search has found."""
LogProbs = Callable[[Sequence[Tensor]], list[Tensor]]
"""Computes the log-probs of rows that are packed in one call of the engine."""


@dataclass(frozen=True)
class Cause:
    """A likely cause of a difference."""

    name: str
    evidence: str
    """Sentences, the last one without a final period."""


def difference(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference over the largest expected value; infinity if a value is not finite."""
    values, wanted = torch.cat(list(actual)), torch.cat(list(expected))
    largest = float((values - wanted).abs().max())
    return largest / float(wanted.abs().max()) if math.isfinite(largest) else math.inf


# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """Log-probs of an engine that differ from those of its oracle, for one row at a time."""

    oracle: Oracle
    rows: Sequence[Tensor]
    actual: Sequence[Tensor]
    tolerance: float

    def select(self, numbers: Sequence[int]) -> "Search":
        """Return the search on some of the rows."""
        return Search(self.oracle, [self.rows[i] for i in numbers], [self.actual[i] for i in numbers], self.tolerance)

    def distance(self, change: Change) -> float:
        """Return the difference between the engine and the oracle with a change; infinity if it is not possible."""
        try:
            return difference(self.actual, self.oracle.log_probs(self.rows, change))
        except Exception:  # of transformers, for a value that the model does not support
            return math.inf


def diagnose_model(search: Search, weights: tuple[str, Weights] | None, log: Callable[[str], None]) -> Cause:
    """Return the change that explains the log-probs of single rows.

    `weights` are those that the engine exports and the cause for which they differ from the folder; None if they agree.
    """
    if not all(bool(values.isfinite().all()) for values in search.actual):
        return Cause("values that are not finite", "The engine computes log-probs that are not finite")
    if weights is not None:
        cause, exported = weights
        own = Change(cause, "with the weights that the engine exports", weights=lambda old: {**old, **exported})
        if search.distance(own) <= search.tolerance:
            return _cause(search, own)
    lengths = [len(row) for row in search.rows]
    short, long = lengths.index(min(lengths)), lengths.index(max(lengths))
    probes = search.select(sorted({short, long, len(lengths) // 2}))
    candidates = list(changes(search.oracle))
    log(f"comparing with {len(candidates)} variants of the model")
    distances: dict[int, float] = {}
    for number, change in enumerate(candidates):
        distances[number] = probes.distance(change)
        if distances[number] <= search.tolerance and search.distance(change) <= search.tolerance:
            return _cause(search, change)
    for family in families(search.oracle):
        log("searching for a rope theta or an attention scale")
        change = _fit(probes, family)
        if change is not None:
            return _cause(search, change)
    return _unknown(search, candidates[min(distances, key=distances.__getitem__)])


def _cause(search: Search, change: Change) -> Cause:
    evidence = f"The log-probs equal those of the model {change.detail} (difference {search.distance(change):.1e})"
    return Cause(change.cause, evidence)


def _fit(search: Search, family: Family) -> Change | None:
    """Search for the number of a family that explains the log-probs. Round it to a few digits if they suffice."""

    @cache
    def distance(log: float) -> float:
        return search.distance(family.change(math.exp(log)))

    low, high = math.log(family.low), math.log(family.high)
    grid = [low + (high - low) * step / (GRID - 1) for step in range(GRID)]
    best = min(range(GRID), key=lambda step: distance(grid[step]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    for _ in range(GOLDEN_STEPS):
        if distance(left) < distance(right):
            high, left, right = right, right - golden * (right - low), left
        else:
            low, left, right = left, right, left + golden * (high - left)
    value, original = math.exp((low + high) / 2), search.distance(Change("", ""))
    for digits in (1, 2, 3, 4):
        rounded = float(f"{value:.{digits}g}")
        if search.distance(family.change(rounded)) <= search.tolerance:
            return family.change(rounded)
    is_exact = search.distance(family.change(value)) <= max(search.tolerance, EXACT * original)
    return family.change(value) if is_exact else None


def _unknown(search: Search, nearest: Change) -> Cause:
    """Describe a difference that no variant explains by the rows that have it."""
    short = search.select([number for number, row in enumerate(search.rows) if len(row) == 2])
    if short.distance(Change("", "")) > search.tolerance:
        where = (
            "Rows in which a token attends only to itself differ too, so the cause is not in the mask, the positions "
            "or the attention scores alone, but in embedding, projections, norms, MLP, experts or output layer"
        )
    else:
        where = (
            "Rows in which a token attends only to itself agree, so embedding, values, norms, MLP and output layer are "
            "right, and the cause is in queries, keys, positions, scores or mask"
        )
    return Cause("unknown", f"{where}. No variant explains it; the nearest is the model {nearest.detail}")


# -- packed rows -----------------------------------------------------------------------------------


def diagnose_packing(log_probs: LogProbs, rows: Sequence[Tensor], tolerance: float) -> Cause:
    """Find out what a row that is computed beside others depends on, by changing tokens of its neighbors."""
    first, second = rows[3], rows[4]
    alone = log_probs([second])[0]

    def effect(changed: Sequence[Tensor], place: int) -> float:
        before = [first, second] if place else [second, first]
        return difference([log_probs(changed)[place]], [log_probs(before)[place]])

    other = max(rows, key=len)[: len(first)]
    if effect([other, second], 1) > tolerance:
        evidence = (
            "A row changes with the tokens of the row before it, so attention, a convolution or a recurrent state "
            "reaches over the start of the row"
        )
        return Cause("state that leaks between rows", evidence)
    if effect([second, other], 0) > tolerance:
        return Cause("mask over the end of rows", "A row changes with the tokens of the row after it")
    moved = difference([log_probs([first, second])[1]], [alone])
    if moved > tolerance:
        evidence = (
            f"A row changes by {moved:.1e} behind another row, but not with its tokens, so the position ids do not "
            "start again at each row"
        )
        return Cause("positions of packed rows", evidence)
    return Cause("unknown", "Two packed rows agree, but all rows together do not; compare micro-batches of other sizes")


def depends_on_earlier_calls(log_probs: LogProbs, rows: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """Return the largest change of the log-probs of single rows if the rows are computed in the reverse order."""
    after = [log_probs([row])[0] for row in reversed(rows)]
    return difference(reversed(after), before)


# -- gradients -------------------------------------------------------------------------------------


def diagnose_gradients(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], untied: Mapping[str, Tensor], tolerance: float
) -> Cause:
    """Explain the gradients of an engine.

    `untied` is the gradient of a tied embedding without the share of the output layer.
    """
    wrong = {name for name, wanted in expected.items() if _relative(actual[name], wanted) > tolerance}
    for name, part in untied.items():
        if name in wrong and _relative(actual[name], part) <= tolerance:
            evidence = f"The gradient of {name} lacks the share of the output layer, whose weight is tied to it"
            return Cause("a tied head untied", evidence)
    zero = sorted(name for name in wrong if not bool(actual[name].any()))
    if zero:
        return Cause("weights that are not trained", f"The gradient is zero for {_listed(zero)}")
    ratios = {name: float((actual[name] * expected[name]).sum() / expected[name].square().sum()) for name in wrong}
    ratio = next(iter(ratios.values()))
    if all(_relative(actual[name], ratio * expected[name]) <= abs(ratio) * tolerance for name in wrong):
        return Cause("scaled gradients", f"The gradient is {ratio:.4g} times that of transformers for {_listed(wrong)}")
    evidence = f"Log-probs agree, and the gradients differ for {_listed(wrong)}: look for a detached or rounded tensor"
    return Cause("unknown", evidence)


def _relative(actual: Tensor, expected: Tensor) -> float:
    return difference([actual.flatten()], [expected.flatten()])


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- weights ---------------------------------------------------------------------------------------


def diagnose_weights(actual: Weights, expected: Weights) -> Cause | None:
    """Explain names or values of an engine's weights that are not those of its folder. None if they agree."""
    if additional := sorted(actual.keys() - expected.keys()):
        return Cause("unknown weights", f"The engine exports {_listed(additional)}, which the model does not have")
    names: dict[int, list[str]] = {}
    for name, weight in expected.items():
        names.setdefault(weight.data_ptr(), []).append(name)
    tied = {name for group in names.values() if len(group) > 1 for name in group}
    if missing := sorted(expected.keys() - actual.keys() - tied):
        return Cause("missing weights", f"The engine does not export {_listed(missing)}")
    wrong = [name for name, weight in actual.items() if not _same(weight, expected[name])]
    if not wrong:
        return None
    if tied.issuperset(wrong):
        evidence = f"The engine has {_listed(wrong)} with values of its own, although the model ties {_listed(tied)}"
        return Cause("a tied head untied", evidence)
    if all(_same(actual[name], expected.get(_counterpart(name), actual[name][:0])) for name in wrong):
        return Cause("q and k swapped", f"{wrong[0]} has the values of {_counterpart(wrong[0])} in the folder")
    for name in wrong:
        order = _order(actual[name], expected[name]) if ".experts." in name else None
        if order is not None:
            return Cause("expert order", f"{name} holds the experts of the folder in the order {order}")
    return Cause("weights", f"The engine exports other values of {_listed(wrong)} than its folder")


def _counterpart(name: str) -> str:
    return name.replace("q_proj", "k_proj") if "q_proj" in name else name.replace("k_proj", "q_proj")


def _order(actual: Tensor, expected: Tensor) -> list[int] | None:
    """Return the order in which the parts of `actual` are in `expected`; None if they are not."""
    if actual.shape != expected.shape:
        return None
    found = [next((i for i, other in enumerate(expected) if _same(part, other)), None) for part in actual]
    order = [number for number in found if number is not None]
    return order if len(order) == len(actual) else None


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool(torch.allclose(first.double(), second.double(), rtol=1e-6, atol=0))
