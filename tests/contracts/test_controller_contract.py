"""What every backend of the controller holds, on one rank and on several.

A new backend joins by a line in `LAYOUTS`.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import ranks  # noqa: F401  (for what it makes the fork server import)
from support.cluster import ray_here
from support.processes import still_running
from support.toy_roles import LateToy, PairedToy, Toy, TwoLayouts

from camshaft.controller import Options, Pool, PoolSpec, pool, pools, shutdown, spawn, submit, workers
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, ConfigError, WorkerError


class Layout(NamedTuple):
    backend: str
    world_size: int

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": self.backend, "world_size": self.world_size, "timeout": 60}


LAYOUTS = [Layout(backend, world) for backend in ("local", "ray") for world in (1, 2, 4)]
SEVERAL = [layout for layout in LAYOUTS if layout.world_size == 2]


def layout_id(layout: Layout) -> str:
    return f"{layout.backend}-{layout.world_size}"


@pytest.fixture(scope="module", params=LAYOUTS, ids=layout_id)
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with ray_here(num_cpus=12):
        yield


@pytest.fixture(scope="module")
def toy(layout: Layout) -> Iterator[Toy]:
    """One group per layout, for tests that leave it as it was."""
    with workers(Toy, factor=3.0, **layout.options) as role:
        yield role


@pytest.fixture(params=SEVERAL, ids=layout_id)
def several(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param.options


def eight_rows() -> DataProto:
    tokens = Ragged.from_rows([torch.arange(row % 3).float() for row in range(8)], dtype=torch.float32)
    return DataProto.from_dict({"tokens": tokens, "uid": [f"u{i}" for i in range(8)]})


# -- results -----------------------------------------------------------------------------------------


def test_the_same_batch_gives_the_same_rows_in_the_same_order_on_any_number_of_ranks(toy: Toy):
    out = toy.scale(eight_rows(), shift=1.0)
    # Row i holds 0, 1, ..., i % 3 - 1; times the factor 3, plus 1.
    assert [row.tolist() for row in out["scaled"].rows()] == [[3.0 * x + 1 for x in range(i % 3)] for i in range(8)]
    assert list(out["uid"]) == [f"u{i}" for i in range(8)]
    assert out.meta_info["said_by"] == 0


def test_each_rank_sees_an_equal_part(toy: Toy, layout: Layout):
    assert toy.rows_seen(eight_rows())["seen"].tolist() == [8 // layout.world_size] * 8


def test_a_method_may_return_nothing(toy: Toy):
    assert toy.keep(eight_rows()) is None


def test_one_to_all_returns_the_result_of_rank_zero(toy: Toy):
    assert toy.set_factor(3.0) == 3.0


def test_rank_zero_runs_on_rank_zero_alone(layout: Layout):
    with workers(Toy, **layout.options) as toy:
        assert [toy.calls_of_rank_zero(), toy.calls_of_rank_zero()] == [1, 2]
        assert toy.counts() == [2, *[0] * (layout.world_size - 1)]


def test_all_to_all_takes_and_gives_one_entry_per_rank(toy: Toy, layout: Layout):
    values = [f"for {rank}" for rank in range(layout.world_size)]
    assert toy.echo(values) == list(enumerate(values))


def test_ranks_reduce_among_themselves_inside_a_method(toy: Toy, layout: Layout):
    world = layout.world_size
    assert toy.sum_over_ranks(0.5) == 0.5 * world + world * (world - 1) / 2


def test_model_parallel_neighbours_work_on_the_same_rows_and_one_of_them_answers(several: dict[str, Any]):
    with workers(PairedToy, factor=3.0, **(several | {"world_size": 4})) as paired:
        assert paired.rows_seen(eight_rows())["seen"].tolist() == [4] * 8
        assert list(paired.scale(eight_rows())["uid"]) == [f"u{i}" for i in range(8)]


def test_a_role_of_several_layouts_splits_each_call_by_the_seats_for_it(several: dict[str, Any]):
    with workers(TwoLayouts, factor=3.0, **(several | {"world_size": 4})) as both:
        assert both.rows_seen(eight_rows())["seen"].tolist() == [2] * 8
        assert both.scale(eight_rows()).meta_info["ranks"] == [{"said_by": 0}, {"said_by": 1}]
        assert list(both.same(eight_rows())["uid"]) == [f"u{i}" for i in range(8)]


def test_seats_are_read_when_they_are_needed_and_put_the_rows_back_in_order(layout: Layout):
    with workers(LateToy, **layout.options) as late:
        late.init_model()  # from here on the last rank reads the first rows
        out = late.scale(eight_rows())
        assert list(out["uid"]) == [f"u{i}" for i in range(8)]
        assert out.meta_info["said_by"] == 0


# -- pools, and calls that are not waited for ----------------------------------------------------------


@pytest.fixture
def two_ranks(several: dict[str, Any]) -> Iterator[Pool]:
    with pool(PoolSpec("devices", ranks_per_node=2), several["backend"], Options(timeout=60)) as devices:
        yield devices


def test_roles_of_one_pool_live_in_the_same_processes_and_know_nothing_of_each_other(two_ranks: Pool):
    first = spawn(Toy, factor=2.0, pool=two_ranks, name="first")
    second = spawn(Toy, factor=5.0, pool=two_ranks, name="second")
    assert first.pids() == second.pids()
    assert [role.scale(eight_rows())["scaled"].values.max().item() for role in (first, second)] == [2.0, 5.0]
    shutdown(first)
    with pytest.raises(WorkerError, match="shut down; spawn it again"):
        first.set_factor(1.0)
    assert second.sum_over_ranks(1.0) == 3.0


@pytest.mark.parametrize("more", [{"world_size": 2}, {"backend": "local"}])
def test_a_role_in_a_pool_says_nothing_of_ranks_or_backend(more: dict[str, Any], two_ranks: Pool):
    with pytest.raises(ConfigError, match=r"Toy: spawn\(pool=...\) does not take world_size or backend"):
        spawn(Toy, pool=two_ranks, **more)


def test_calls_of_one_pool_run_in_the_order_of_their_start(two_ranks: Pool):
    toy = spawn(Toy, pool=two_ranks)
    started = [submit(toy.set_factor, float(number)) for number in range(5)]
    scaled = submit(toy.scale, eight_rows())
    assert scaled.result()["scaled"].values.max() == 4.0
    assert [one.result() for one in reversed(started)] == [4.0, 3.0, 2.0, 1.0, 0.0]


def test_a_small_answer_does_not_overtake_a_large_one(two_ranks: Pool):
    toy = spawn(Toy, pool=two_ranks)
    large, small = (DataProto.from_dict({"x": torch.zeros(8, width)}) for width in (200_000, 1))
    for _ in range(30):
        waits = [(batch, submit(toy.same, batch)) for batch in (large, small, large, small, small)]
        assert all(wait.result()["x"].shape == batch["x"].shape for batch, wait in waits)


@pytest.mark.alone
def test_pools_work_at_the_same_time(several: dict[str, Any]):
    specs = [PoolSpec("a", ranks_per_node=2), PoolSpec("b", ranks_per_node=2)]
    with pools(specs, several["backend"], Options(timeout=60)) as (first, second):
        roles = [spawn(Toy, pool=one) for one in (first, second)]
        start = time.monotonic()
        waits = [submit(role.stall, 1, seconds=2.0) for role in roles]
        begun = time.monotonic() - start
        for wait in waits:
            wait.result()
        assert begun < 1.0
        assert 2.0 <= time.monotonic() - start < 3.5


def test_pools_on_one_machine_share_its_cores(several: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """With a thread for each core in each of them, threads would wait for those that others keep from running."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with pools([PoolSpec("a"), PoolSpec("b")], several["backend"], Options(timeout=60)) as started:
        threads = [told[-1] for one in started for told in spawn(Toy, pool=one).environment()]
    assert threads == [max(1, cores // 2)] * 2


def test_what_a_started_call_raises_is_raised_by_its_result(two_ranks: Pool):
    toy = spawn(Toy, pool=two_ranks)
    failing, after = submit(toy.fail_everywhere), submit(toy.set_factor, 1.0)
    with pytest.raises(WorkerError, match="KeyError: 'weights of layer 3'"):
        failing.result()
    with pytest.raises(WorkerError, match=r"its workers have ended \(fail_everywhere failed"):
        after.result()


@pytest.mark.alone
def test_a_rank_that_dies_in_one_pool_ends_the_wait_for_another(several: dict[str, Any]):
    specs = [PoolSpec("a", ranks_per_node=2), PoolSpec("b", ranks_per_node=2)]
    with pools(specs, several["backend"], Options(timeout=60)) as (first, second):
        slow, dying = spawn(Toy, pool=first, name="slow"), spawn(Toy, pool=second, name="dying")
        waiting = submit(slow.stall, 1, seconds=30.0)
        started = submit(dying.kill, 0)
        begun = time.monotonic()
        with pytest.raises(WorkerError, match="rank 0 of 2 of dying"):
            waiting.result()
        assert time.monotonic() - begun < 5
        with pytest.raises(WorkerError, match="its workers have ended"):
            started.result()


def test_what_workers_write_goes_to_a_file_of_each_rank(several: dict[str, Any], tmp_path: Path):
    options = Options(timeout=60, log_folder=str(tmp_path / "logs"))
    with pool(PoolSpec("devices", ranks_per_node=2), several["backend"], options) as devices:
        spawn(Toy, pool=devices, name="critic").log("here I am")
    for rank in range(2):
        lines = (tmp_path / "logs" / f"devices_rank{rank}.log").read_text().splitlines()
        assert any(line.endswith(f" INFO critic/{rank} camshaft.toy: here I am") for line in lines)
        assert "of a child: here I am" in lines


# -- the parts of a result -----------------------------------------------------------------------------


def tell(folder: Path, rank: int, complaint: str = "") -> str:
    """Let a rank answer that waits in `Toy.when_told`."""
    (folder / "draft").write_text(complaint)
    (folder / "draft").rename(folder / str(rank))
    return str(folder)


def uids(first: int, end: int) -> list[str]:
    return [f"u{i}" for i in range(first, end)]


def test_the_parts_are_those_that_the_result_is_made_of(toy: Toy, layout: Layout):
    scaling = submit(toy.scale, eight_rows())
    parts, size = dict(scaling.parts()), 8 // layout.world_size
    assert sorted(parts) == list(range(layout.world_size))
    for dp_rank, part in parts.items():
        assert list(part["uid"]) == uids(dp_rank * size, (dp_rank + 1) * size)
        assert part.meta_info["said_by"] == dp_rank
    whole, joined = scaling.result(), DataProto.concat([parts[dp_rank] for dp_rank in sorted(parts)])
    assert torch.equal(whole["scaled"].values, joined["scaled"].values)
    assert list(whole["uid"]) == uids(0, 8)


def test_a_part_is_there_while_another_rank_is_still_at_work(two_ranks: Pool, tmp_path: Path):
    toy = spawn(Toy, pool=two_ranks)
    working = submit(toy.when_told, eight_rows(), tell(tmp_path, 1))
    seen: list[tuple[int, list[str]]] = []
    for dp_rank, part in working.parts():
        seen.append((dp_rank, list(part["uid"])))
        tell(tmp_path, 0)  # which waits for it
    assert seen == [(1, uids(4, 8)), (0, uids(0, 4))]
    assert list(working.result()["uid"]) == uids(0, 8)


def test_a_rank_that_fails_after_another_has_given_its_part_is_one_error(two_ranks: Pool, tmp_path: Path):
    toy = spawn(Toy, pool=two_ranks)
    working = submit(toy.when_told, eight_rows(), tell(tmp_path, 1))
    parts = working.parts()
    assert next(parts)[0] == 1
    tell(tmp_path, 0, "weights of layer 3")
    with pytest.raises(WorkerError, match=r"^Toy.when_told raised on rank 0 of 2: KeyError: 'weights of layer 3'"):
        next(parts)
    with pytest.raises(WorkerError, match=r"its workers have ended \(when_told failed"):
        working.result()


def test_parts_are_counted_by_seat_and_come_from_the_ranks_that_collect(several: dict[str, Any]):
    with workers(PairedToy, **(several | {"world_size": 4})) as paired:
        assert {place: list(part["uid"]) for place, part in submit(paired.same, eight_rows()).parts()} == {
            0: uids(0, 4),
            1: uids(4, 8),
        }
    with workers(LateToy, **several) as late:
        late.init_model()  # from here on the last rank reads the first rows
        assert {place: list(part["uid"]) for place, part in submit(late.same, eight_rows()).parts()} == {
            0: uids(0, 4),
            1: uids(4, 8),
        }


# -- mistakes on the driver leave the ranks as they were ---------------------------------------------


def test_an_undecorated_method_is_refused_by_name(toy: Toy):
    with pytest.raises(AttributeError, match=r"Toy\.helper is not decorated with @register"):
        toy.helper()


def test_a_misspelt_method_names_the_nearest(toy: Toy):
    with pytest.raises(AttributeError, match="did you mean 'scale'"):
        toy.scael(eight_rows())  # pyright: ignore[reportAttributeAccessIssue]


def test_a_wrong_result_type_is_refused_by_name(toy: Toy, layout: Layout):
    with pytest.raises(BatchError, match="returned float on rank 0"):
        toy.mean(DataProto.from_dict({"x": torch.ones(8)}))
    assert toy.rows_seen(eight_rows())["seen"].tolist() == [8 // layout.world_size] * 8


def test_rows_that_do_not_divide_are_refused_and_can_be_padded(several: dict[str, Any]):
    with workers(Toy, **several) as toy:
        odd = eight_rows().reorder(slice(0, 5))
        with pytest.raises(BatchError, match=r"5 = 2 x 2 \+ 1"):
            toy.scale(odd)
        padded, added = odd.pad_to_divisor(2)
        assert list(toy.scale(padded).unpad(added)["uid"]) == ["u0", "u1", "u2", "u3", "u4"]


def test_an_argument_that_cannot_be_sent_is_one_sentence(several: dict[str, Any]):
    with workers(Toy, **several) as toy:
        with pytest.raises(WorkerError, match=r"Toy.echo: an argument cannot be sent .* top level"):
            toy.echo([lambda: None, 1])
        assert toy.echo([1, 2]) == [(0, 1), (1, 2)]


# -- what goes wrong on a rank -----------------------------------------------------------------------


@pytest.mark.alone
def test_an_exception_reaches_the_driver_with_its_traceback_once(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    pids = toy.pids()
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        toy.fail(1)  # rank 0 waits for rank 1 in a barrier
    assert time.monotonic() - started < 5
    message = str(caught.value)
    assert message.startswith("Toy.fail raised on rank 1 of 2: KeyError: 'weights of layer 3'")
    assert message.count("Traceback") == 1
    assert 'raise KeyError("weights of layer 3")' in message
    assert "controller" not in message  # no frame of ours
    assert isinstance(caught.value.__cause__, KeyError)
    assert still_running(pids, 1) == []


def test_the_same_exception_on_all_ranks_is_told_once(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    with pytest.raises(WorkerError) as caught:
        toy.fail_everywhere()
    assert str(caught.value).count("Traceback") == 1


def test_a_group_that_failed_says_why_when_it_is_called_again(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    with pytest.raises(WorkerError):
        toy.fail(0)
    with pytest.raises(WorkerError, match=r"Toy.set_factor: its workers have ended \(fail failed: .*layer 3.*spawn it"):
        toy.set_factor(1.0)
    shutdown(toy)


def test_a_role_that_cannot_be_built_is_an_error_of_spawn(several: dict[str, Any]):
    before = set(multiprocessing.active_children())
    with pytest.raises(WorkerError, match=r"Toy.__init__ raised on rank 1 of 2: ValueError: no such model"):
        spawn(Toy, fail_on=1, **several)
    assert set(multiprocessing.active_children()) <= before


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    with pytest.raises(WorkerError, match=r"give_a_lambda raised on rank 0 of 2: .*lambda"):
        toy.give_a_lambda()


@pytest.mark.alone
def test_a_rank_that_does_not_answer_is_named_with_its_stack(several: dict[str, Any]):
    toy = spawn(Toy, name="critic", **(several | {"timeout": 3}))
    pids = toy.pids()
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        toy.stall(1)
    assert 3 <= time.monotonic() - started < 8
    message = str(caught.value)
    assert message.startswith("critic.stall: rank(s) 1 of 2 have not answered for 3.")
    assert "spawn(..., timeout=3)" in message
    assert "in stall" in message  # the frame that it hangs in
    assert "On rank 0" not in message  # which has answered
    assert still_running(pids, 1) == []


@pytest.mark.alone
def test_a_killed_rank_is_an_error_within_seconds(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    pids = toy.pids()
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"rank 1 of 2 of Toy \(process {pids[1]}\) died in kill \(.*SIGKILL.*memory"
    ):
        toy.kill(1)  # rank 0 waits for it, and loses its connection
    assert time.monotonic() - started < 5
    assert still_running(pids, 1) == []


@pytest.mark.alone
def test_a_rank_that_was_killed_between_calls_is_found_by_the_next(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    pids = toy.pids()
    os.kill(pids[0], signal.SIGKILL)
    assert still_running(pids[:1], 5) == []
    with pytest.raises(WorkerError, match=r"rank 0 of 2 of Toy .* died in set_factor \(.*SIGKILL"):
        toy.set_factor(1.0)
    assert still_running(pids, 1) == []


@pytest.mark.alone
def test_a_frozen_rank_blocks_neither_a_large_message_nor_its_own_end(several: dict[str, Any]):
    toy = spawn(Toy, **(several | {"timeout": 3}))
    pids = toy.pids()
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"rank\(s\) 1 of 2 have not answered.*") as caught:
        toy.echo([torch.zeros(1_000_000)] * 2)
    assert "did not react to a signal" in str(caught.value)
    assert still_running(pids, 1) == []


# -- what is left ------------------------------------------------------------------------------------


def test_nothing_is_left_after_shutdown(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    pids = [*toy.pids(), *toy.start_child()]
    shutdown(toy)
    assert still_running(pids, 2) == []
    with pytest.raises(WorkerError, match="it was shut down"):
        toy.set_factor(1.0)


def test_nothing_is_left_of_a_role_with_child_processes_after_an_error(several: dict[str, Any]):
    toy = spawn(Toy, **several)
    pids = [*toy.pids(), *toy.start_child()]
    with pytest.raises(WorkerError):
        toy.fail(0)
    assert still_running(pids, 2) == []
