"""What a pool of processes asks of its machines, and whether they have it. Pure: no process is started here.

    asked = [PoolSpec("global_pool", nnodes=2, ranks_per_node=8, device="cuda"), PoolSpec("critic", 1, 4, "cuda")]
    told = shortage(asked, [Node("10.0.0.1", total={"GPU": 8, "CPU": 64}, free={"GPU": 8, "CPU": 60}), ...])

A scheduler that cannot place something waits for it without a word. So the sum is done here, before anything is asked
of it, and what does not fit is one message: each pool with its roles, each machine, and the first pool without a place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class PoolSpec:
    """Processes that live together: each has a device of its own and may hold several roles."""

    name: str = "workers"
    nnodes: int = 1
    ranks_per_node: int = 1
    device: str | None = None
    """The kind of device of each rank, "cpu" or "cuda" say; None for an accelerator if each can have one."""
    cpus_per_rank: float = 1.0
    roles: tuple[str, ...] = ()
    """Who is to live there, for messages."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.ranks_per_node

    def per_node(self, accelerator: str = "GPU") -> dict[str, float]:
        """What it needs of one machine, under the scheduler's names."""
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


def shortage(asked: Sequence[PoolSpec], nodes: Sequence[Node]) -> str | None:
    """Why the machines cannot hold all pools at once, with both sides of the sum; None if they can."""
    left = [dict(node.free) for node in nodes]
    for spec in asked:
        need = spec.per_node()
        fits = [free for free in left if _covers(free, need)]
        if len(fits) < spec.nnodes:
            return _told(spec, len(fits), asked, nodes)
        for free in fits[: spec.nnodes]:
            for kind, amount in need.items():
                free[kind] -= amount
    return None


def _covers(free: Amounts, need: Amounts) -> bool:
    return all(free.get(kind, 0.0) + 1e-6 >= amount for kind, amount in need.items())


def _told(short: PoolSpec, fits: int, asked: Sequence[PoolSpec], nodes: Sequence[Node]) -> str:
    need = short.per_node()
    empty = sum(_covers(node.total, need) for node in nodes)
    busy = ", the rest is in use or promised to the pools above" if empty > fits else ""
    head = (
        f"the cluster has no room for pool '{short.name}': it asks for {short.nnodes} machine(s) with {_amounts(need)} "
        f"free on each, and {fits} can give that{busy}."
    )
    rows = [
        (spec.name, ", ".join(spec.roles), f"{spec.nnodes} x {spec.ranks_per_node}", _amounts(_times(spec)))
        for spec in asked
    ]
    sums: dict[str, float] = {}
    for spec in asked:
        for kind, amount in _times(spec).items():
            sums[kind] = sums.get(kind, 0.0) + amount
    wanted = _table([("pool", "roles", "nodes x ranks", "asks for"), *rows, ("sum", "", "", _amounts(sums))])
    machines = [(node.name, _amounts(_shown(node.free, sums)), _amounts(_shown(node.total, sums))) for node in nodes]
    there = _table([("machine", "free", "of"), *machines])
    return f"{head}\n\n{wanted}\n\n{there}"


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
