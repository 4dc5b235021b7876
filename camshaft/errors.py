"""Exception classes of camshaft.

Each class stands for an area in which users can fix errors. A message contains the problem, the value and the fix.
Violated internal invariants are AssertionErrors, and errors of other libraries are not converted.

    except CamshaftError as error:
        return report_error(error)  # in every entry point: print the message without a traceback
"""

import sys


class CamshaftError(Exception):
    """Base class of all errors of this package. The command line prints them without a traceback."""


class ConfigError(CamshaftError, ValueError):
    """A config key is unknown, has an invalid value, or contradicts another key."""


class BatchError(CamshaftError, ValueError):
    """A batch lacks a column, has a column of the wrong shape, or cannot be split as requested."""


class EngineError(CamshaftError, RuntimeError):
    """A training engine received an unsupported setting or call, or calls in the wrong order."""


class RolloutError(CamshaftError, RuntimeError):
    """A rollout received an unsupported request, or a weight sync failed."""


class RewardError(CamshaftError, RuntimeError):
    """A reward function cannot be loaded, or failed with `on_error=raise`."""


class StorageError(CamshaftError, RuntimeError):
    """A remote file system is unreachable, or a copy differs from its source."""


class CheckpointError(CamshaftError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""


class DivergenceError(CamshaftError, RuntimeError):
    """A model has diverged: its gradients or outputs are not finite."""


class WorkerError(CamshaftError, RuntimeError):
    """A worker process raised, died or did not answer in time."""


def report_error(error: CamshaftError) -> int:
    """Print the message to stderr, and return the exit status: 2 for config errors, 1 for all others."""
    if isinstance(error, ConfigError):
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stderr.write(f"camshaft: {type(error).__name__}: {error}\n")
    return 1
