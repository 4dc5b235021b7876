"""The contract of controller backends as a suite of rules about results, pools and pending calls.

    for rule in RULES:
        rule.check(ControllerHarness(start, folder))          # raises Violation
    for verdict in check_controller(start, folder): ...       # checks all rules

`start` is the backend, a function that takes pool specs and `Options` and returns running pools. A rule is a function
of a harness. Its docstring states the requirement, and reports show its name. `failures.py` contains the rules about
errors and cleanup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from camshaft.contracts.controller import failures
from camshaft.contracts.controller.harness import (
    ControllerHarness,
    Start,
    eight_rows,
    expect_equal,
    expect_faster,
    expect_worker_error,
    uids,
)
from camshaft.contracts.controller.roles import LateToy, PairedToy, Toy, TwoLayouts
from camshaft.contracts.rules import Rule, Verdict, expect, make_rules, run_rules
from camshaft.controller import shutdown, spawn, submit
from camshaft.dataproto import DataProto

# -- results ---------------------------------------------------------------------------------------


def rows_keep_their_order(harness: ControllerHarness) -> None:
    """A data-parallel call returns the same rows in the same order for any number of ranks."""
    with harness.each_world(factor=3.0) as roles:
        for world, toy in roles:
            out = toy.scale(eight_rows(), shift=1.0)
            scaled = [row.tolist() for row in out["scaled"].rows()]
            expect_equal(scaled, [[3.0 * x + 1 for x in range(i % 3)] for i in range(8)], f"rows on {world} ranks")
            expect_equal(list(out["uid"]), uids(0, 8), f"uids on {world} ranks")
            expect_equal(out.meta_info["answered_by"], 0, "dp_rank of the meta_info")
            expect_equal(toy.rows_seen(eight_rows())["seen"].tolist(), [8 // world] * 8, "rows per rank")
            expect_equal(toy.keep(eight_rows()), None, "result of a method that returns None")


def modes_choose_ranks(harness: ControllerHarness) -> None:
    """ONE_TO_ALL returns the result of rank 0, RANK_ZERO runs only on rank 0, and ALL_TO_ALL takes and returns one
    entry per rank."""
    with harness.each_world() as roles:
        for world, toy in roles:
            expect_equal(toy.set_factor(3.0), 3.0, "ONE_TO_ALL")
            expect_equal([toy.calls_of_rank_zero(), toy.calls_of_rank_zero()], [1, 2], "RANK_ZERO")
            expect_equal(toy.counts(), [2, *[0] * (world - 1)], "calls per rank after RANK_ZERO")
            values = [f"for {rank}" for rank in range(world)]
            expect_equal(toy.echo(values), list(enumerate(values)), "ALL_TO_ALL")


def ranks_share_a_process_group(harness: ControllerHarness) -> None:
    """The ranks of a pool can run collectives in a method."""
    with harness.each_world() as roles:
        for world, toy in roles:
            expect_equal(toy.sum_over_ranks(0.5), 0.5 * world + world * (world - 1) / 2, f"sum over {world} ranks")


def seats_split_and_merge(harness: ControllerHarness) -> None:
    """Ranks with the same dp_rank get the same rows, and one of them returns the result. A role may have a different
    seat for each method."""
    with harness.role(PairedToy, world=4, factor=3.0) as paired:
        expect_equal(paired.rows_seen(eight_rows())["seen"].tolist(), [4] * 8, "rows per pair of ranks")
        expect_equal(list(paired.scale(eight_rows())["uid"]), uids(0, 8), "uids")
    with harness.role(TwoLayouts, world=4, factor=3.0) as both:
        expect_equal(both.rows_seen(eight_rows())["seen"].tolist(), [2] * 8, "rows per rank")
        expect_equal(both.scale(eight_rows()).meta_info["ranks"], [{"answered_by": 0}, {"answered_by": 1}], "meta_info")
        expect_equal(list(both.same(eight_rows())["uid"]), uids(0, 8), "uids")


def seats_are_read_late(harness: ControllerHarness) -> None:
    """Seats are read when a batch is split, not earlier. Results are in the original order for any order of seats."""
    with harness.each_world(LateToy) as roles:
        for world, toy in roles:
            toy.init_model()  # afterwards, the last rank gets the first rows
            out = toy.scale(eight_rows())
            expect_equal(list(out["uid"]), uids(0, 8), f"uids on {world} ranks")
            expect_equal(out.meta_info["answered_by"], 0, "dp_rank of the meta_info")


# -- pools -----------------------------------------------------------------------------------------


def roles_share_processes(harness: ControllerHarness) -> None:
    """Roles of one pool share its processes but no state. Shutting down one role does not affect the others."""
    with harness.pools(2) as (pool,):
        double, quintuple = (spawn(Toy, factor=factor, pool=pool, name=f"x{factor:g}") for factor in (2.0, 5.0))
        expect_equal(double.pids(), quintuple.pids(), "process ids")
        maxima = [role.scale(eight_rows())["scaled"].values.max().item() for role in (double, quintuple)]
        expect_equal(maxima, [2.0, 5.0], "factors of the roles")
        shutdown(double)
        expect_worker_error(lambda: double.set_factor(1.0), "shut down; spawn it again")
        expect_equal(quintuple.sum_over_ranks(1.0), 3.0, "sum of the remaining role")


def pools_share_the_cores(harness: ControllerHarness) -> None:
    """The ranks of all pools on one machine share its cores equally, unless OMP_NUM_THREADS is set."""
    num_threads = os.environ.pop("OMP_NUM_THREADS", None)
    try:
        with harness.pools(1, 1) as pools:
            threads = [environment[-1] for pool in pools for environment in spawn(Toy, pool=pool).environment()]
    finally:
        if num_threads is not None:
            os.environ["OMP_NUM_THREADS"] = num_threads
    expect_equal(threads, [max(1, len(os.sched_getaffinity(0)) // 2)] * 2, "threads per rank")


def pools_run_at_once(harness: ControllerHarness) -> None:
    """Calls on two pools run concurrently, and submit() does not wait."""
    with harness.pools(2, 2) as pools:
        roles = [spawn(Toy, pool=pool) for pool in pools]
        begin = time.monotonic()
        with expect_faster(1.0):
            pending = [submit(role.stall, 1, seconds=2.0) for role in roles]
        for call in pending:
            call.result()
        duration = time.monotonic() - begin
        expect(2.0 <= duration < 3.5, f"two concurrent calls of 2 s took {duration:.1f} s, expected 2.0 to 3.5 s")


def output_goes_to_log_files(harness: ControllerHarness) -> None:
    """The output of each rank and of its child processes goes to one file per rank. Log lines contain role and rank."""
    folder = harness.folder / "logs"
    with harness.pools(2, log_folder=str(folder)) as (pool,):
        spawn(Toy, pool=pool, name="critic").log("hello")
    for rank in range(2):
        file = folder / f"pool0_rank{rank}.log"
        expect(file.exists(), f"{file} does not exist")
        lines = file.read_text().splitlines()
        line = f" INFO critic/{rank} {Toy.__module__}: hello"
        expect(any(text.endswith(line) for text in lines), f"the log of rank {rank} has no line '{line}': {lines}")
        expect("of a child: hello" in lines, f"the log of rank {rank} lacks the output of a child process: {lines}")


# -- pending calls ---------------------------------------------------------------------------------


def calls_run_in_order(harness: ControllerHarness) -> None:
    """Calls on one pool run in the order of submission. Their results can be read in any order."""
    with harness.role() as toy:
        pending = [submit(toy.set_factor, float(number)) for number in range(5)]
        scaled = submit(toy.scale, eight_rows())
        expect_equal(scaled.result()["scaled"].values.max().item(), 4.0, "factor of the last call")
        expect_equal([call.result() for call in reversed(pending)], [4.0, 3.0, 2.0, 1.0, 0.0], "results")


def small_answers_do_not_overtake(harness: ControllerHarness) -> None:
    """Small and large results of consecutive calls are not confused, even if a small result arrives earlier."""
    with harness.role() as toy:
        large, small = (DataProto.from_dict({"x": torch.zeros(8, width)}) for width in (200_000, 1))
        for _ in range(30):
            batches = [large, small, large, small, small]
            pending = [submit(toy.same, batch) for batch in batches]
            shapes = [call.result()["x"].shape for call in pending]
            expect_equal(shapes, [batch["x"].shape for batch in batches], "shapes of the answers")


def parts_make_the_result(harness: ControllerHarness) -> None:
    """The parts of a pending call are numbered by dp_rank, and its result is their concatenation."""
    with harness.each_world() as roles:
        for world, toy in roles:
            scaling = submit(toy.scale, eight_rows())
            parts, size = dict(scaling.parts()), 8 // world
            expect_equal(sorted(parts), list(range(world)), "numbers of the parts")
            for dp_rank, part in parts.items():
                expect_equal(list(part["uid"]), uids(dp_rank * size, (dp_rank + 1) * size), f"part {dp_rank}")
                expect_equal(part.meta_info["answered_by"], dp_rank, f"meta_info of part {dp_rank}")
            expect_equal(list(scaling.result()["uid"]), uids(0, 8), "result after the parts")


def parts_follow_seats(harness: ControllerHarness) -> None:
    """Parts are numbered by the dp_rank of the seats, and only collecting ranks yield parts."""
    halves = {0: uids(0, 4), 1: uids(4, 8)}
    with harness.role(PairedToy, world=4) as paired:
        parts = {number: list(part["uid"]) for number, part in submit(paired.same, eight_rows()).parts()}
        expect_equal(parts, halves, "parts of pairs of ranks")
    with harness.role(LateToy) as toy:
        toy.init_model()  # afterwards, the last rank gets the first rows
        parts = {number: list(part["uid"]) for number, part in submit(toy.same, eight_rows()).parts()}
        expect_equal(parts, halves, "parts if dp_ranks are in reverse order")


def parts_arrive_early(harness: ControllerHarness) -> None:
    """A part is available while other ranks are still running."""
    with harness.role() as toy:
        pending = submit(toy.wait_for_file, eight_rows(), harness.allow_answer(1))
        parts: list[tuple[int, list[str]]] = []
        for dp_rank, part in pending.parts():
            parts.append((dp_rank, list(part["uid"])))
            harness.allow_answer(0)  # rank 0 waits for this file
        expect_equal(parts, [(1, uids(4, 8)), (0, uids(0, 4))], "parts in the order of arrival")
        expect_equal(list(pending.result()["uid"]), uids(0, 8), "uids of the result")


def listeners_hear_parts_early(harness: ControllerHarness) -> None:
    """A listener gets each part when it arrives, while the driver waits for calls of another pool."""
    with harness.pools(2, 1) as pools:
        toy, other = (spawn(Toy, pool=pool) for pool in pools)
        heard: dict[int, list[str]] = {}
        scaling = submit(toy.scale, eight_rows())
        scaling.listen(lambda dp_rank, part: heard.update({dp_rank: list(part["uid"])}))
        for _ in range(20):
            if len(heard) < 2:
                other.stall(0, seconds=0.5)
        expect_equal(heard, {0: uids(0, 4), 1: uids(4, 8)}, "parts that the listener got")
        expect_equal(list(scaling.result()["uid"]), uids(0, 8), "result")
        scaling = submit(toy.scale, eight_rows())
        toy.set_factor(1.0)  # afterwards, the answers are there
        heard.clear()
        scaling.listen(lambda dp_rank, part: heard.update({dp_rank: list(part["uid"])}))
        expect_equal(heard, {0: uids(0, 4), 1: uids(4, 8)}, "parts that had arrived")


RULES: tuple[Rule[ControllerHarness], ...] = make_rules(
    rows_keep_their_order,
    modes_choose_ranks,
    ranks_share_a_process_group,
    seats_split_and_merge,
    seats_are_read_late,
    roles_share_processes,
    pools_share_the_cores,
    pools_run_at_once,
    output_goes_to_log_files,
    calls_run_in_order,
    small_answers_do_not_overtake,
    parts_make_the_result,
    parts_follow_seats,
    parts_arrive_early,
    listeners_hear_parts_early,
    *failures.CHECKS,
)


def check_controller(start: Start, folder: str, rules: Sequence[Rule[ControllerHarness]] = RULES) -> Iterator[Verdict]:
    """Check the rules one after another and yield a verdict for each. `folder` is a scratch folder."""
    return run_rules(rules, lambda number: ControllerHarness(start, Path(folder) / f"{number:02d}"))
