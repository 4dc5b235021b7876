"""camshaft: reinforcement-learning post-training of language models on one training-engine interface.

    import camshaft

    run = camshaft.train(model="models/tiny", data="train.jsonl", reward=my_reward, algorithm="grpo", steps=60)
    run.history["critic/score/mean"]

Importing the package imports only its version. The subpackages have further names:

    from camshaft.engine import EngineConfig, build_engine
    from camshaft.rollout import SamplingParams, build_rollout
    from camshaft.dataproto import DataProto, Ragged
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from camshaft.version import __version__ as __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from camshaft.dataproto import DataProto
    from camshaft.runs.run import Run

    Path = str | os.PathLike[str]
    Rows = Iterable[Mapping[str, Any]]
    Reward = Path | Callable[..., Any] | Sequence[Callable[..., Any] | tuple[Callable[..., Any], float]]
    Environment = Path | type | Sequence[Path | type] | Mapping[str, type]
    Hook = Callable[[int, DataProto, dict[str, float]], Mapping[str, float] | None]

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m camshaft` puts the working directory first on the import path. There, a file such as yaml.py would be
    # imported instead of the installed package.
    sys.path.append(sys.path.pop(0))

__all__ = ["train", "sft", "reward_model", "load_run", "Run"]


def train(
    *,
    model: Any,
    data: Path | Sequence[Path] | Rows,
    reward: Reward | None = None,
    environment: Environment | None = None,
    agent: str | Callable[..., Any] | None = None,
    tools: Path | Sequence[Path] | Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    algorithm: str | None = None,
    steps: int | None = None,
    val_data: Path | Sequence[Path] | Rows | None = None,
    tokenizer: Any = None,
    on_step: Hook | Sequence[Hook] = (),
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Run:
    """Train a language model with reinforcement learning, and return the run.

    The keys, their checks and the training are those of `camshaft ppo`. Ctrl-C finishes the current step, saves a
    checkpoint, and returns the run with the status "stopped".

    Args:
        model: Path of a Hugging Face folder, name of a cached model, or a model of transformers, which is written to
            the run folder.
        data: Training prompts: a path, a list of paths, or rows, which are a sequence of dicts such as a list or a
            `datasets.Dataset`.
        reward: Reward function: a Python function, a path as on the command line, or a list of functions and
            (function, weight) pairs. None selects a built-in function by the data, or none with an environment or an
            agent.
        environment: Environment with which the policy plays episodes: a class with the methods `reset` and `step`, or
            with `reset` and tools, a path as on the command line, or several of them, of which the column
            `environment` of the data selects one.
        agent: Program that plays episodes instead of an environment: a function `solve(base_url, api_key, **row)`, or a
            path or command as on the command line.
        tools: Functions that the policy may call, or their paths as on the command line.
        algorithm: ppo, grpo, rloo, dapo or another algorithm.
        steps: Number of training steps.
        val_data: Validation prompts, in the forms of `data`.
        tokenizer: Tokenizer, as a path or an object. None uses that of the model.
        on_step: Hooks that are called after each step with the step, its batch and its metrics. A dict that a hook
            returns is added to the metrics.
        config: Config keys, nested or dotted, for example {"actor_rollout_ref": {"rollout": {"n": 8}}}.
        **keys: Short names such as lr, batch, n, lora and out, which `camshaft ppo --help` lists, and dotted keys.
    """
    from camshaft.runs.run import Run
    from camshaft.runs.start import Objects, start

    given = {name: value for name, value in {"algorithm": algorithm, "steps": steps}.items() if value is not None}
    objects = Objects(model, tokenizer, data, val_data, reward, on_step, environment, agent, tools)
    return Run(*start("ppo", objects, {**given, **keys}, config))


def sft(
    *,
    model: Any,
    data: Path | Sequence[Path] | Rows,
    steps: int | None = None,
    val_data: Path | Sequence[Path] | Rows | None = None,
    tokenizer: Any = None,
    on_step: Hook | Sequence[Hook] = (),
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Run:
    """Fine-tune a language model on examples, and return the run. The keys are those of `camshaft sft`.

    The arguments are those of `camshaft.train`. The trained model is in the subfolder `huggingface` of the run.
    """
    from camshaft.runs.run import Run
    from camshaft.runs.start import Objects, start

    objects = Objects(model, tokenizer, data, val_data, on_step=on_step)
    return Run(*start("sft", objects, keys if steps is None else {"steps": steps, **keys}, config))


def reward_model(
    *,
    model: Any,
    data: Path | Sequence[Path] | Rows,
    steps: int | None = None,
    val_data: Path | Sequence[Path] | Rows | None = None,
    tokenizer: Any = None,
    on_step: Hook | Sequence[Hook] = (),
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Run:
    """Train a reward model on preference pairs, and return the run. The keys are those of `camshaft rm`.

    The arguments are those of `camshaft.train`. The trained model is in the subfolder `huggingface` of the run.
    """
    from camshaft.runs.run import Run
    from camshaft.runs.start import Objects, start

    objects = Objects(model, tokenizer, data, val_data, on_step=on_step)
    return Run(*start("rm", objects, keys if steps is None else {"steps": steps, **keys}, config))


def load_run(folder: Path) -> Run:
    """Return the run in a folder, which Python or the command line has started. Reading it needs no torch.

    Only the Python functions of the run, such as its reward, are not stored.
    """
    from camshaft.runs.run import load_run as load

    return load(folder)


def __getattr__(name: str) -> Any:
    if name == "Run":
        from camshaft.runs.run import Run

        return Run
    raise AttributeError(f"module 'camshaft' has no attribute {name!r}")
