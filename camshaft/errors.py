"""Every error that camshaft raises on purpose.

One class for each place where a person has to act: the config, a batch, an engine, a rollout, a
reward, a file elsewhere, a checkpoint. A message says what was wrong, the value, and what to type next. Invariants of
our own are plain `assert`s; errors of libraries travel unchanged.

    except CamshaftError as error:
        return tell(error)          # what every entry point does: one message, an exit status, no trace
"""

import sys


class CamshaftError(Exception):
    """What all errors of this library have in common; the command line prints these without a trace."""


class ConfigError(CamshaftError, ValueError):
    """A key of the config is unknown, has a wrong value, or two keys contradict each other."""


class BatchError(CamshaftError, ValueError):
    """A batch lacks a column, has a misshapen one, or cannot be split as asked."""


class EngineError(CamshaftError, RuntimeError):
    """A training engine was asked for something it cannot do, or in the wrong order."""


class RolloutError(CamshaftError, RuntimeError):
    """Generation was asked for something it cannot do, or weights did not arrive."""


class RewardError(CamshaftError, RuntimeError):
    """A reward function cannot be loaded, or failed where the config says that failing is fatal."""


class StorageError(CamshaftError, RuntimeError):
    """Another file system cannot be reached, or what was copied from it is not what is there."""


class CheckpointError(CamshaftError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""


class WorkerError(CamshaftError, RuntimeError):
    """A worker process raised, died or did not answer in time."""


def tell(error: CamshaftError) -> int:
    """Write the message to stderr; the exit status is 2 for a wrong config or argument, 1 for all else."""
    if isinstance(error, ConfigError):
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stderr.write(f"camshaft: {type(error).__name__}: {error}\n")
    return 1
