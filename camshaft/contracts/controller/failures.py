"""Rules of the controller contract about invalid calls, failures of ranks, and cleanup. `suite.py` lists them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from camshaft.contracts.controller.harness import (
    ControllerHarness,
    eight_rows,
    expect_ended,
    expect_equal,
    expect_faster,
    expect_worker_error,
    uids,
)
from camshaft.contracts.controller.roles import LateToy, Toy
from camshaft.contracts.rules import expect, expect_error
from camshaft.controller import shutdown, spawn, submit
from camshaft.dataproto import DataProto
from camshaft.errors import BatchError

# -- invalid calls ---------------------------------------------------------------------------------


def unregistered_methods_are_rejected(harness: ControllerHarness) -> None:
    """Calling a method without @register or a misspelled method raises an AttributeError that states the reason."""
    with harness.role() as toy:
        expect_error(
            lambda: toy.helper(),
            "Toy.helper is not decorated with @register",
            "a method without @register ran",
            AttributeError,
        )
        misspelled = lambda: toy.scael(eight_rows())  # noqa: E731  # pyright: ignore[reportAttributeAccessIssue]
        expect_error(misspelled, "did you mean 'scale'", "a misspelled method ran", AttributeError)


def wrong_batches_leave_the_ranks_intact(harness: ControllerHarness) -> None:
    """A row count that is not divisible, an invalid result, or an argument that cannot be pickled raises an error. The
    role remains usable."""
    with harness.role() as toy:
        rows = eight_rows().reorder(slice(0, 5))
        expect_error(lambda: toy.scale(rows), "5 = 2 x 2 + 1", "5 rows were split for 2 ranks", BatchError)
        padded, added = rows.pad_to_divisor(2)
        expect_equal(list(toy.scale(padded).unpad(added)["uid"]), uids(0, 5), "uids of a padded batch")
        ones = DataProto.from_dict({"x": torch.ones(8)})
        expect_error(lambda: toy.mean(ones), "returned float on rank 0", "a float was merged", BatchError)
        expect_worker_error(lambda: toy.echo([lambda: None, 1]), "Toy.echo: an argument cannot be sent", "top level")
        expect_equal(toy.echo([1, 2]), [(0, 1), (1, 2)], "result of a call after the errors")


# -- failures of ranks -----------------------------------------------------------------------------


def exceptions_reach_the_driver(harness: ControllerHarness) -> None:
    """An exception on one rank raises an error within seconds. It contains the rank and the traceback, and its cause is
    the exception."""
    with harness.role() as toy:
        pids = toy.pids()
        with expect_faster(5.0):
            error = expect_worker_error(lambda: toy.fail(1))  # rank 0 waits for rank 1 in a barrier
        text = str(error)
        start = "Toy.fail raised on rank 1 of 2: KeyError: 'weights of layer 3'"
        expect(text.startswith(start), f"the error does not start with '{start}': {text}")
        expect_equal(text.count("Traceback"), 1, "number of tracebacks")
        expect('raise KeyError("weights of layer 3")' in text, f"the traceback lacks the line that raised: {text}")
        internal = ("controller/executor.py", "controller/worker.py")
        expect(not any(file in text for file in internal), f"the traceback shows frames of the controller: {text}")
        expect(isinstance(error.__cause__, KeyError), f"the cause is {error.__cause__!r}, expected a KeyError")
        expect_ended(pids)
        again = "Toy.set_factor: its workers have ended (fail failed: "
        expect_worker_error(lambda: toy.set_factor(1.0), again, "layer 3", "spawn it again")
        shutdown(toy)


def equal_failures_are_one_error(harness: ControllerHarness) -> None:
    """If all ranks raise the same exception, it is reported once."""
    with harness.role() as toy:
        error = expect_worker_error(lambda: toy.fail_everywhere())
        expect_equal(str(error).count("Traceback"), 1, "number of tracebacks")


def pending_calls_raise(harness: ControllerHarness) -> None:
    """A pending result raises the error of its call. The errors of later calls state why the workers have ended."""
    with harness.role() as toy:
        failing, after = submit(toy.fail_everywhere), submit(toy.set_factor, 1.0)
        expect_worker_error(failing.result, "KeyError: 'weights of layer 3'")
        expect_worker_error(after.result, "its workers have ended (fail_everywhere failed")


def failures_after_a_part_are_errors(harness: ControllerHarness) -> None:
    """If a rank fails after another rank has answered, parts() and result() both raise an error."""
    with harness.role() as toy:
        pending = submit(toy.wait_for_file, eight_rows(), harness.allow_answer(1))
        parts = pending.parts()
        expect_equal(next(parts)[0], 1, "first part")
        harness.allow_answer(0, "weights of layer 3")
        expect_worker_error(
            lambda: next(parts), "Toy.wait_for_file raised on rank 0 of 2: KeyError: 'weights of layer 3'"
        )
        expect_worker_error(pending.result, "its workers have ended (wait_for_file failed")


def construction_errors_are_raised_by_spawn(harness: ControllerHarness) -> None:
    """If a role cannot be built, spawn() raises an error."""
    with harness.pools(2) as (pool,):
        expect_worker_error(
            lambda: spawn(Toy, fail_on=1, pool=pool), "Toy.__init__ raised on rank 1 of 2: ValueError: no such model"
        )


def results_must_pickle(harness: ControllerHarness) -> None:
    """A result that cannot be pickled raises an error that contains the rank."""
    with harness.role() as toy:
        expect_worker_error(lambda: toy.give_a_lambda(), "give_a_lambda raised on rank 0 of 2", "lambda")


def late_ranks_are_reported(harness: ControllerHarness) -> None:
    """If a rank exceeds the time limit, the pool ends and the error contains the rank and its stack."""
    with harness.role(timeout=3, name="critic") as toy:
        pids = toy.pids()
        begin = time.monotonic()
        error = expect_worker_error(
            lambda: toy.stall(1), "critic.stall: no answer from rank(s) 1 of 2 (", "for 3.", "spawn(..., timeout=3)"
        )
        duration = time.monotonic() - begin
        expect(3 <= duration < 8, f"a time limit of 3 s took effect after {duration:.1f} s")
        expect("in stall" in str(error), f"the error lacks the stack of the late rank: {error}")
        expect("On rank 0" not in str(error), f"the error shows the stack of a rank that has answered: {error}")
        expect_ended(pids)


def killed_ranks_are_errors(harness: ControllerHarness) -> None:
    """If a rank is killed during a call, the call raises an error within seconds."""
    with harness.role() as toy:
        pids = toy.pids()
        with expect_faster(5.0):  # rank 0 waits for rank 1 and loses its connection
            expect_worker_error(
                lambda: toy.kill(1), f"rank 1 of 2 of Toy (process {pids[1]}) died in kill (", "SIGKILL", "memory"
            )
        expect_ended(pids)


def deaths_between_calls_are_detected(harness: ControllerHarness) -> None:
    """If a rank is killed between two calls, the next call raises an error."""
    with harness.role() as toy:
        pids = toy.pids()
        os.kill(pids[0], signal.SIGKILL)
        expect_ended(pids[:1], 5)
        expect_worker_error(lambda: toy.set_factor(1.0), "rank 0 of 2 of Toy", "died in set_factor (", "SIGKILL")
        expect_ended(pids)


def deaths_end_waits_for_other_pools(harness: ControllerHarness) -> None:
    """If a rank of one pool dies, a call that waits for another pool raises an error."""
    with harness.pools(2, 2) as (first, second):
        slow, dying = spawn(Toy, pool=first, name="slow"), spawn(Toy, pool=second, name="dying")
        waiting, killed = submit(slow.stall, 1, seconds=30.0), submit(dying.kill, 0)
        with expect_faster(5.0):
            expect_worker_error(waiting.result, "rank 0 of 2 of dying")
        expect_worker_error(killed.result, "its workers have ended")


def restorable_pools_start_again(harness: ControllerHarness) -> None:
    """If a rank dies, a pool that may start again has the state of its roles, and answers the unfinished calls once."""
    with harness.pools(2, 1, max_restarts=1, restored=("set_factor", "init_model")) as (pool, beside):
        toy, other = spawn(LateToy, pool=pool), spawn(Toy, pool=beside)
        toy.init_model()
        for factor in (3.0, 5.0):
            toy.set_factor(factor)
        pids, heard = toy.pids(), []
        tokens = (5.0 * eight_rows()["tokens"].values).tolist()
        waiting = submit(toy.wait_for_file, eight_rows(), harness.allow_answer(0))
        waiting.listen(lambda dp_rank, _: heard.append(dp_rank))
        while not heard:
            other.echo([0])
        os.kill(pids[1], signal.SIGKILL)
        harness.allow_answer(1)
        for _ in range(2):
            scaled = toy.scale(eight_rows())
            expect_equal(list(scaled["uid"]), uids(0, 8), "rows")
            expect_equal(scaled["scaled"].values.tolist(), tokens, "scaled tokens")
            expect_equal(list(waiting.result()["uid"]), uids(0, 8), "rows of the call that was interrupted")
            expect_equal(sorted(heard), [0, 1], "parts that the listener got")
            expect_ended(pids)
            pids = toy.pids()
            os.kill(pids[0], signal.SIGKILL)  # after an answer, this death is not in a row with the first one


def restarts_in_a_row_are_limited(harness: ControllerHarness) -> None:
    """If a pool that may start again dies in each attempt, the call raises an error with their number."""
    with harness.pools(2, max_restarts=2) as (pool,):
        toy = spawn(Toy, pool=pool)
        pids = toy.pids()
        error = expect_worker_error(lambda: toy.kill(1), "rank 1 of 2 of Toy", "died in kill (", "SIGKILL")
        expect_equal(error.__notes__, ["Number of restarts of the pool 'pool0' in a row: 2."], "notes of the error")
        expect_ended(pids)
        expect_worker_error(lambda: toy.set_factor(1.0), "its workers have ended")


def suspended_ranks_do_not_block(harness: ControllerHarness) -> None:
    """Sending a large message to a suspended (SIGSTOP) process does not hang, nor does ending its pool."""
    with harness.role(timeout=3) as toy:
        pids = toy.pids()
        os.kill(pids[1], signal.SIGSTOP)
        expect_worker_error(
            lambda: toy.echo([torch.zeros(1_000_000)] * 2),
            "no answer from rank(s) 1 of 2",
            f"process {pids[1]} (suspended; `kill -CONT {pids[1]}` resumes it)",
            "did not react to a signal",
        )
        expect_ended(pids)


# -- cleanup ---------------------------------------------------------------------------------------


def shutdown_leaves_no_process(harness: ControllerHarness) -> None:
    """After shutdown, no rank and no child process of a role runs, and calls raise an error with the reason."""
    with harness.pools(2) as (pool,):
        toy = spawn(Toy, pool=pool)
        pids = [*toy.pids(), *toy.start_child()]
        pool.shutdown()
        expect_ended(pids)
        expect_worker_error(lambda: toy.set_factor(1.0), "it was shut down")


def errors_leave_no_process(harness: ControllerHarness) -> None:
    """After an error, no rank and no child process of a role runs."""
    with harness.role() as toy:
        pids = [*toy.pids(), *toy.start_child()]
        expect_worker_error(lambda: toy.fail(0))
        expect_ended(pids)


CHECKS: tuple[Callable[[ControllerHarness], None], ...] = (
    unregistered_methods_are_rejected,
    wrong_batches_leave_the_ranks_intact,
    exceptions_reach_the_driver,
    equal_failures_are_one_error,
    pending_calls_raise,
    failures_after_a_part_are_errors,
    construction_errors_are_raised_by_spawn,
    results_must_pickle,
    late_ranks_are_reported,
    killed_ranks_are_errors,
    deaths_between_calls_are_detected,
    deaths_end_waits_for_other_pools,
    restorable_pools_start_again,
    restarts_in_a_row_are_limited,
    suspended_ranks_do_not_block,
    shutdown_leaves_no_process,
    errors_leave_no_process,
)
