"""Resources of pools and machines, compared with hand-worked numbers."""

from camshaft.controller.resources import Node, PoolSpec, shortage


def machines(count: int, gpus: float = 8, cpus: float = 64, busy: float = 0) -> list[Node]:
    return [
        Node(f"10.0.0.{number}", {"GPU": gpus, "CPU": cpus}, {"GPU": gpus - busy, "CPU": cpus})
        for number in range(1, count + 1)
    ]


def test_several_pools_fit_on_one_machine() -> None:
    pools = [PoolSpec("a", 1, 6, "cuda"), PoolSpec("b", 1, 2, "cuda")]
    assert shortage(pools, machines(1)) is None
    assert shortage([*pools, PoolSpec("c", 1, 1, "cuda")], machines(1)) is not None
    assert shortage([*pools, PoolSpec("c", 1, 1, "cuda")], machines(2)) is None


def test_a_pool_of_several_nodes_needs_several_machines() -> None:
    assert shortage([PoolSpec("a", 2, 4, "cuda")], machines(1)) is not None
    assert shortage([PoolSpec("a", 2, 4, "cuda")], machines(2)) is None


def test_nodes_with_one_address_are_several_machines() -> None:
    assert shortage([PoolSpec("a", 2, 8, "cuda")], machines(1) * 2) is None


def test_ranks_on_the_cpu_need_no_accelerator() -> None:
    assert shortage([PoolSpec("a", 1, 8, "cpu", cpus_per_rank=0.25)], machines(1, gpus=0, cpus=2)) is None
    assert shortage([PoolSpec("a", 1, 9, "cpu", cpus_per_rank=0.25)], machines(1, gpus=0, cpus=2)) is not None


def test_the_message_has_both_sides_of_the_sum() -> None:
    pools = [
        PoolSpec("global_pool", 2, 8, "cuda", roles=("actor_rollout_ref",)),
        PoolSpec("critics", 1, 4, "cuda", roles=("critic",)),
    ]
    message = shortage(pools, machines(2))
    assert message is not None
    lines = [line.split() for line in message.splitlines()]
    assert message.startswith(
        "the cluster is too small for pool 'critics': it needs 1 machine(s) with 4 GPU, 4 CPU free"
    )
    assert "but 0 have that much free; others are in use or reserved for the pools listed before it." in message
    assert ["global_pool", "actor_rollout_ref", "2", "x", "8", "16", "GPU,", "16", "CPU"] in lines
    assert ["sum", "20", "GPU,", "20", "CPU"] in lines
    assert ["10.0.0.2", "8", "GPU,", "64", "CPU", "8", "GPU,", "64", "CPU"] in lines


def test_resources_in_use_are_not_free() -> None:
    message = shortage([PoolSpec("a", 1, 8, "cuda")], machines(1, busy=2))
    assert message is not None
    assert "are in use" in message
    assert "are in use" not in (shortage([PoolSpec("a", 1, 9, "cuda")], machines(1, busy=2)) or "")
