"""Finds the change of the oracle, or the leak between rows, that explains the outputs of an engine.

explain_model       log-probs of single rows: tries the variants of `changes.py`
explain_packing     outputs that depend on the other rows of a batch
explain_gradients   gradients of an engine whose outputs are right
explain_weights     exported weights that are not those of the folder
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from camshaft.parity.model.changes import Family, changes, families
from camshaft.parity.model.oracle import Change, Oracle, Weights

GRID, ROUNDS = 25, 12
"""Numbers of values in each round of a search, and of rounds, each between the neighbors of the best value."""
EXACT = 1e-4
"""Fraction of the difference that may remain with a number that a search has found."""
Outputs = Callable[[Sequence[Tensor]], list[Tensor]]
"""Computes the outputs of rows that are packed in one call of the engine."""


class Cause(NamedTuple):
    """A likely cause of a difference."""

    name: str
    evidence: str
    """Sentences, the last one without a final period."""


def difference(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference over the largest expected value; infinity if a value is not finite."""
    values, wanted = (torch.cat([tensor.flatten() for tensor in side]) for side in (actual, expected))
    largest = float((values - wanted).abs().max())
    return largest / float(wanted.abs().max()) if math.isfinite(largest) else math.inf


# -- the model -------------------------------------------------------------------------------------


class Search(NamedTuple):
    """Log-probs of an engine that differ from those of its oracle, for one row at a time."""

    oracle: Oracle
    rows: Sequence[Tensor]
    actual: Sequence[Tensor]
    tolerance: float

    def select(self, lengths: Iterable[int]) -> "Search":
        """Return the search on the rows with these lengths."""
        numbers = [number for number, row in enumerate(self.rows) if len(row) in set(lengths)]
        return self._replace(rows=[self.rows[i] for i in numbers], actual=[self.actual[i] for i in numbers])

    def distance(self, change: Change) -> float:
        """Return the difference between the engine and the oracle with a change; infinity if it is not possible."""
        try:
            return difference(self.actual, self.oracle.log_probs(self.rows, change))
        except Exception:  # of transformers, for a value that the model does not support
            return math.inf

    def cause(self, change: Change) -> Cause | None:
        """Return a change as the cause if it explains all rows."""
        distance = self.distance(change)
        evidence = f"The log-probs equal those of the model {change.detail} (difference {distance:.1e})"
        return Cause(change.cause, evidence) if distance <= self.tolerance else None


def explain_model(search: Search, weights: tuple[str, Weights] | None, log: Callable[[str], None]) -> Cause:
    """Return the change that explains the log-probs of single rows.

    `weights` are those that the engine exports and the cause for which they differ from the folder; None if they agree.
    """
    if not all(bool(values.isfinite().all()) for values in search.actual):
        return Cause("values that are not finite", "The engine computes log-probs that are not finite")
    if weights is not None:
        cause, exported = weights
        own = Change(cause, "with the weights that the engine exports", weight=lambda old, n: exported.get(n, old[n]))
        if found := search.cause(own):
            return found
    lengths = sorted(map(len, search.rows))
    probes, candidates = search.select((lengths[0], lengths[-1])), list(changes(search.oracle))
    log(f"comparing with {len(candidates)} variants of the model")
    distances = []
    for change in candidates:
        distances.append(probes.distance(change))
        if distances[-1] <= search.tolerance and (found := search.cause(change)):
            return found
    for family in families(search.oracle):
        log("searching for a rope theta or an attention scale")
        if found := _fit(search, probes, family):
            return found
    return _unknown(search, candidates[distances.index(min(distances))])


def _fit(search: Search, probes: Search, family: Family) -> Cause | None:
    """Search for the number of a family that explains the log-probs. Round it to a few digits if they suffice."""
    low, high = math.log(family.low), math.log(family.high)
    for _ in range(ROUNDS):
        grid = [low + (high - low) * step / (GRID - 1) for step in range(GRID)]
        distances = [probes.distance(family.change(math.exp(value))) for value in grid]
        best = distances.index(min(distances))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
        if distances[best] > probes.distance(Change()):
            return None
    value = math.exp((low + high) / 2)
    rounded = (family.change(float(f"{value:.{digits}g}")) for digits in (1, 2, 3, 4))
    if found := next(filter(None, map(search.cause, rounded)), None):
        return found
    tolerance = max(search.tolerance, EXACT * search.distance(Change()))
    return search._replace(tolerance=tolerance).cause(family.change(value))


def _unknown(search: Search, nearest: Change) -> Cause:
    """Describe a difference that no variant explains by the rows that have it."""
    if search.select((2,)).distance(Change()) > search.tolerance:
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


def explain_packing(outputs: Outputs, rows: Sequence[Tensor], tolerance: float) -> Cause:
    """Find out what a row that is computed beside others depends on, by changing tokens of its neighbors."""
    first, second = rows[3], rows[4]
    other, alone = max(rows, key=len)[: len(first)], outputs([second])[0]
    behind = outputs([first, second])[1]
    if difference([outputs([other, second])[1]], [behind]) > tolerance:
        evidence = (
            "A row changes with the tokens of the row before it, so attention, a convolution or a recurrent state "
            "reaches over the start of the row"
        )
        return Cause("state that leaks between rows", evidence)
    if difference([outputs([second, other])[0]], [outputs([second, first])[0]]) > tolerance:
        return Cause("mask over the end of rows", "A row changes with the tokens of the row after it")
    if (moved := difference([behind], [alone])) > tolerance:
        evidence = (
            f"A row changes by {moved:.1e} behind another row, but not with its tokens, so the position ids do not "
            "start again at each row"
        )
        return Cause("positions of packed rows", evidence)
    return Cause("unknown", "Two packed rows agree, but all rows together do not; compare micro-batches of other sizes")


def explain_calls(outputs: Outputs, rows: Sequence[Tensor], before: Sequence[Tensor], tolerance: float) -> Cause | None:
    """Return a cause if the outputs of single rows change when the rows are computed in the reverse order."""
    change = difference([outputs([row])[0] for row in reversed(rows)], reversed(before))
    evidence = f"The outputs of a row change by {change:.1e} with the rows of earlier calls"
    return Cause("state that leaks between rows", evidence) if change > tolerance else None


# -- gradients and weights -------------------------------------------------------------------------


def explain_gradients(
    actual: Mapping[str, Tensor], wrong: Mapping[str, Tensor], untied: Mapping[str, Tensor], tolerance: float
) -> Cause:
    """Explain the gradients that differ, of which `wrong` holds the expected values.

    `untied` is the gradient of a tied embedding without the share of the output layer.
    """
    for name in untied.keys() & wrong.keys():
        if difference([actual[name]], [untied[name]]) <= tolerance:
            evidence = f"The gradient of {name} lacks the share of the output layer, whose weight is tied to it"
            return Cause("a tied head untied", evidence)
    if zero := [name for name in wrong if not bool(actual[name].any())]:
        return Cause("weights that are not trained", f"The gradient is zero for {_listed(zero)}")
    ratio = next(float((actual[name] * g).sum() / g.square().sum()) for name, g in wrong.items())
    if all(difference([actual[name]], [ratio * g]) <= tolerance for name, g in wrong.items()):
        return Cause("scaled gradients", f"The gradient is {ratio:.4g} times that of transformers for {_listed(wrong)}")
    evidence = f"Outputs agree, and the gradients differ for {_listed(wrong)}: look for a detached or rounded tensor"
    return Cause("unknown", evidence)


def explain_weights(actual: Weights, expected: Weights) -> Cause | None:
    """Explain names or values of an engine's weights that are not those of its folder. None if they agree."""
    if additional := actual.keys() - expected.keys():
        return Cause("unknown weights", f"The engine exports {_listed(additional)}, which the model does not have")
    pointers = [weight.data_ptr() for weight in expected.values()]
    tied = {name for name, weight in expected.items() if pointers.count(weight.data_ptr()) > 1}
    if missing := expected.keys() - actual.keys() - tied:
        return Cause("missing weights", f"The engine does not export {_listed(missing)}")
    wrong = [name for name, weight in actual.items() if not _same(weight, expected[name])]
    if not wrong:
        return None
    if tied.issuperset(wrong):
        evidence = f"The engine has {_listed(wrong)} with values of its own, although the model ties {_listed(tied)}"
        return Cause("a tied head untied", evidence)
    swap = {name: name.replace("q_proj", "K").replace("k_proj", "q_proj").replace("K", "k_proj") for name in wrong}
    if all(other in expected and _same(actual[name], expected[other]) for name, other in swap.items()):
        return Cause("q and k swapped", f"{wrong[0]} has the values of {swap[wrong[0]]} in the folder")
    for name in (name for name in wrong if ".experts." in name):
        matches = [[_same(part, other) for other in expected[name]] for part in actual[name]]
        if all(map(any, matches)):
            order = [row.index(True) for row in matches]
            return Cause("expert order", f"{name} holds the experts of the folder in the order {order}")
    return Cause("weights", f"The engine exports other values of {_listed(wrong)} than its folder")


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool(torch.allclose(first.double(), second.double(), rtol=1e-6, atol=0))


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
