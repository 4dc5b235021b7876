import pytest

from camshaft.controller.worker import RankInfo, Worker, build_worker
from camshaft.seat import Seat


class Role(Worker):
    def __init__(self, factor: int, *, shift: int = 0):  # without super().__init__()
        self.factor = factor
        self.place = (self.rank, self.world, self.device, shift)


def test_a_role_built_directly_has_one_rank():
    role = Role(3)
    assert role.place == (0, 1, "cpu", 0)
    assert role.seat == Seat()


def test_a_role_has_its_rank_during_construction():
    role = build_worker(Role, RankInfo(rank=1, world=4, device="cuda:1"), (3,), {"shift": 5})
    assert role.place == (1, 4, "cuda:1", 5)
    assert role.factor == 3


def test_by_default_all_ranks_are_data_parallel_and_collect():
    role = build_worker(Role, RankInfo(rank=1, world=4), (3,), {})
    assert role.seat == Seat(rank=1, world=4, dp_rank=1, dp_size=4, collects=True)


def test_places_do_not_leak_between_roles():
    build_worker(Role, RankInfo(rank=1, world=4), (3,), {})
    assert Role(3).world == 1


def test_errors_of_the_role_are_raised_unchanged():
    with pytest.raises(TypeError, match="factor"):
        build_worker(Role, RankInfo(), (), {})
