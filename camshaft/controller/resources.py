"""Compare the resources that pools request with those of the machines. Starts no process.

    specs = [PoolSpec("global_pool", nnodes=2, ranks_per_node=8, device="cuda"), PoolSpec("critic", 1, 4, "cuda")]
    problem = shortage(specs, [Node("10.0.0.1", total={"GPU": 8, "CPU": 64}, free={"GPU": 8, "CPU": 60}), ...])

A scheduler waits silently for a pool that no machine can hold. Comparing first gives an error message with all
pools and their roles, all machines, and the first pool that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class PoolSpec:
    """Size and resources of a pool: each rank is a process with one device, and may hold several roles."""

    name: str = "workers"
    nnodes: int = 1
    ranks_per_node: int = 1
    device: str | None = None
    """Device type of the ranks, such as "cpu" or "cuda"; None: an accelerator if the machine has one per rank."""
    cpus_per_rank: float = 1.0
    roles: tuple[str, ...] = ()
    """Names of the roles of the pool, for messages."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.ranks_per_node

    def per_node(self, accelerator: str = "GPU") -> dict[str, float]:
        """Return the resources that the pool needs on each machine, under the scheduler's names."""
        need = {"CPU": round(self.cpus_per_rank * self.ranks_per_node, 4)}
        if self.device not in (None, "cpu"):
            need[accelerator] = float(self.ranks_per_node)
        return need


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    name: str
    total: Amounts
    free: Amounts = field(default_factory=dict)


def shortage(specs: Sequence[PoolSpec], nodes: Sequence[Node]) -> str | None:
    """Return a message with requested and free resources if the machines cannot hold all pools, else None."""
    left = [dict(node.free) for node in nodes]
    for spec in specs:
        need = spec.per_node()
        fits = [free for free in left if _covers(free, need)]
        if len(fits) < spec.nnodes:
            return _message(spec, len(fits), specs, nodes)
        for free in fits[: spec.nnodes]:
            for kind, amount in need.items():
                free[kind] -= amount
    return None


def _covers(free: Amounts, need: Amounts) -> bool:
    return all(free.get(kind, 0.0) + 1e-6 >= amount for kind, amount in need.items())


def _message(short: PoolSpec, fits: int, specs: Sequence[PoolSpec], nodes: Sequence[Node]) -> str:
    need = short.per_node()
    empty = sum(_covers(node.total, need) for node in nodes)
    busy = "; the others are in use or reserved for the pools above" if empty > fits else ""
    head = (
        f"the cluster is too small for pool '{short.name}': it needs {short.nnodes} machine(s) with {_amounts(need)} "
        f"free on each, and {fits} have that{busy}."
    )
    rows = [
        (spec.name, ", ".join(spec.roles), f"{spec.nnodes} x {spec.ranks_per_node}", _amounts(_times(spec)))
        for spec in specs
    ]
    sums: dict[str, float] = {}
    for spec in specs:
        for kind, amount in _times(spec).items():
            sums[kind] = sums.get(kind, 0.0) + amount
    requested = _table([("pool", "roles", "nodes x ranks", "needs"), *rows, ("sum", "", "", _amounts(sums))])
    machines = [(node.name, _amounts(_shown(node.free, sums)), _amounts(_shown(node.total, sums))) for node in nodes]
    available = _table([("machine", "free", "total"), *machines])
    return f"{head}\n\n{requested}\n\n{available}"


def _times(spec: PoolSpec) -> dict[str, float]:
    return {kind: amount * spec.nnodes for kind, amount in spec.per_node().items()}


def _shown(amounts: Amounts, kinds: Amounts) -> dict[str, float]:
    return {kind: amounts.get(kind, 0.0) for kind in kinds}


def _amounts(amounts: Amounts) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in sorted(amounts.items(), reverse=True))


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
