"""Compare the resources that pools request with those of the machines, before any process is started.

    specs = [PoolSpec("global_pool", nnodes=2, ranks_per_node=8, device="cuda"), PoolSpec("critic", 1, 4, "cuda")]
    problem = shortage(specs, [Node("10.0.0.1", total={"GPU": 8, "CPU": 64}, free={"GPU": 8, "CPU": 60}), ...])

A scheduler waits silently if no machine can hold a pool. This module instead returns an error message that lists all
pools with their roles, all machines, and the first pool that does not fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class PoolSpec:
    """Size and resources of a pool. Each rank is a process with one device and may hold several roles."""

    name: str = "workers"
    nnodes: int = 1
    ranks_per_node: int = 1
    device: str | None = None
    """Device type of the ranks, such as "cpu" or "cuda". None uses an accelerator if the machine has one per rank."""
    cpus_per_rank: float = 1.0
    roles: tuple[str, ...] = ()
    """Names of the pool's roles, for error messages."""
    max_restarts: int = 0
    """Number of times in a row that the pool starts again after one of its processes has died."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.ranks_per_node

    def per_node(self, accelerator: str = "GPU") -> dict[str, float]:
        """Return the amount of each resource that the pool needs on each machine, under the scheduler's names."""
        amounts = {"CPU": round(self.cpus_per_rank * self.ranks_per_node, 4)}
        if self.device not in (None, "cpu"):
            amounts[accelerator] = float(self.ranks_per_node)
        return amounts


@dataclass(frozen=True)
class Node:
    """A machine of the cluster with its total and free resources."""

    name: str
    total: Amounts
    free: Amounts = field(default_factory=dict[str, float])


def shortage(specs: Sequence[PoolSpec], nodes: Sequence[Node]) -> str | None:
    """Return an error message with requested and free resources if the machines cannot hold all pools, else None."""
    free_amounts = [dict(node.free) for node in nodes]
    for spec in specs:
        request = spec.per_node()
        candidates = [free for free in free_amounts if _covers(free, request)]
        if len(candidates) < spec.nnodes:
            return _shortage_message(spec, len(candidates), specs, nodes)
        for free in candidates[: spec.nnodes]:
            for kind, amount in request.items():
                free[kind] -= amount
    return None


def _covers(available: Amounts, request: Amounts) -> bool:
    return all(available.get(kind, 0.0) + 1e-6 >= amount for kind, amount in request.items())


def _shortage_message(pool: PoolSpec, num_fitting: int, specs: Sequence[PoolSpec], nodes: Sequence[Node]) -> str:
    request = pool.per_node()
    num_large_enough = sum(_covers(node.total, request) for node in nodes)
    reason = "; others are in use or reserved for the pools listed before it" if num_large_enough > num_fitting else ""
    head = (
        f"the cluster is too small for pool '{pool.name}': it needs {pool.nnodes} machine(s) with "
        f"{_format_amounts(request)} free on each, but {num_fitting} have that much free{reason}."
    )
    rows = [("pool", "roles", "nodes x ranks", "needs")]
    sums: dict[str, float] = {}
    for spec in specs:
        total = {kind: amount * spec.nnodes for kind, amount in spec.per_node().items()}
        sums |= {kind: sums.get(kind, 0.0) + amount for kind, amount in total.items()}
        size = f"{spec.nnodes} x {spec.ranks_per_node}"
        rows.append((spec.name, ", ".join(spec.roles), size, _format_amounts(total)))
    requested = _table([*rows, ("sum", "", "", _format_amounts(sums))])
    machines = [
        (node.name, _format_amounts(_select(node.free, sums)), _format_amounts(_select(node.total, sums)))
        for node in nodes
    ]
    available = _table([("machine", "free", "total"), *machines])
    return f"{head}\n\n{requested}\n\n{available}"


def _select(amounts: Amounts, kinds: Amounts) -> dict[str, float]:
    """Return the amounts of the resources in `kinds`."""
    return {kind: amounts.get(kind, 0.0) for kind in kinds}


def _format_amounts(amounts: Amounts) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in sorted(amounts.items(), reverse=True))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as a table with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(f"  {line}" for line in lines)
