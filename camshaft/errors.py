"""Exception classes of camshaft.

Each class stands for an area in which users can fix errors. A message contains the problem, the value and the fix.
Violated internal invariants are AssertionErrors, and errors of other libraries are not converted.

    except CamshaftError as error:
        return report_error(error)  # in every entry point: print the message without a traceback
"""

import errno
import sys
import traceback
from types import TracebackType

from camshaft.masking import printable

_FIXES = {
    errno.ENOSPC: "free space on the disk, or use a folder on another disk",
    errno.EDQUOT: "free space in your quota, or use a folder on another disk",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), or use a folder on another disk",
    errno.EROFS: "use a folder that can be written",
    errno.EACCES: "change its permissions, or use another path",
    errno.EPERM: "change its permissions, or use another path",
    errno.ENOENT: "check the path; another program may have deleted it while the command ran",
    errno.EEXIST: "rename or delete it",
    errno.ENOTDIR: "rename or delete the file that is in the place of a folder",
    errno.EISDIR: "rename or delete the folder that is in the place of a file",
    errno.EIO: "check the disk",
    errno.ESTALE: "check the network file system",
    errno.ENXIO: "rename or delete the socket or device that is in the place of a file",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "end programs that keep many files open, or raise the limit of the system (fs.file-max)",
    errno.ENOMEM: "free memory, or raise its limit (`ulimit -v`, or that of the container)",
    errno.EAGAIN: "raise the limit of processes and threads (`ulimit -u`, or that of the container)",
}
"""Fix for each error of the operating system that a user can correct."""


class CamshaftError(Exception):
    """Base class of all errors of this package. The command line prints them without a traceback.

    A message often quotes data, files or responses, so it is masked and escaped (`masking.py`) when it is shown.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(CamshaftError, ValueError):
    """A config key is unknown, has an invalid value, or contradicts another key."""


class ClusterError(ConfigError):
    """A cluster cannot be reached, or has fewer resources than the config requests, which may change."""


class BatchError(CamshaftError, ValueError):
    """A batch lacks a column, has a column of the wrong shape, or cannot be split as requested."""


class EngineError(CamshaftError, RuntimeError):
    """A training engine received an unsupported setting or call, or calls in the wrong order."""


class RolloutError(CamshaftError, RuntimeError):
    """A rollout received an unsupported request, or a weight sync failed."""


class GeneratorError(RolloutError):
    """The process of a generator or its server has ended, does not answer, or was started again without the weights."""


class NoAnswerError(RolloutError):
    """A generator or its server has not answered within the time limit."""


class RewardError(CamshaftError, RuntimeError):
    """A reward function cannot be loaded, or failed with `on_error=raise`."""


class ScoringAbandoned(RewardError):
    """A stop signal arrived, and the responses were not scored in time. The trainer saves the last finished step."""


class StorageError(CamshaftError, RuntimeError):
    """A remote file system is unreachable, or a copy differs from its source."""


class CheckpointError(CamshaftError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""


class FormatError(CheckpointError):
    """A newer version of this package has written a checkpoint. It is not damaged, so a run must not replace it."""


class LedgerError(CamshaftError, RuntimeError):
    """A batch of an asynchronous run was sent, received or learned out of order, or is older than its bound."""


class DivergenceError(CamshaftError, RuntimeError):
    """A model has diverged: its gradients or outputs are not finite."""


class IdleError(CamshaftError, RuntimeError):
    """Nothing was trained in many consecutive steps: no token contributed to a loss."""


class WorkerError(CamshaftError, RuntimeError):
    """A worker process raised an error, died, or did not answer in time."""

    peak_memory: int | None = None
    """Peak memory of the failed rank in bytes: of its tensors on a device, or the growth of its process on a CPU. If
    the process is gone, it is the largest growth of the other ranks. None if it is unknown."""


def report_error(error: CamshaftError) -> int:
    """Print the message to stderr, and return the exit status: 2 for config errors, 1 for all others."""
    text = printable("\n\n".join([str(error), *vars(error).get("__notes__", ())]))
    if isinstance(error, ConfigError):
        sys.stderr.write(f"{text}\n")
        return 2
    sys.stderr.write(f"camshaft: {type(error).__name__}: {text}\n")
    return 1


def report_file_error(error: OSError) -> int | None:
    """Print a message for an error of the operating system, and return the exit status, or None for another error."""
    fix = _FIXES.get(error.errno or 0)
    if fix is None:
        return None
    path = error.filename2 or error.filename
    subject = "" if path is None else f"{path}: "
    sys.stderr.write(printable(f"camshaft: {subject}{error.strerror}; {fix}") + "\n")
    return 1


def report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected exception to stderr. This is a `sys.excepthook`."""
    if sys.stderr is not None:  # closed
        sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))
