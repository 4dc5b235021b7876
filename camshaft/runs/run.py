"""A run and what it has written: metrics, responses and checkpoints.

    run = load_run("runs/digits")
    run.history["critic/score/mean"]        # one value per step
    run.responses(40)[0]["response"]

Reading needs no torch. `Run.export` and `Run.resume` import it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from camshaft import storage
from camshaft.errors import ConfigError
from camshaft.masking import HIDDEN
from camshaft.runs.launch import PYTHON, Launch, as_hooks
from camshaft.tracking.base import Command
from camshaft.tracking.console import format_number
from camshaft.tracking.run_folder import INFO, METRICS, Metrics, RunFolder, State
from camshaft.view.panels import HEADLINES
from camshaft.view.text import compare, table

if TYPE_CHECKING:
    from camshaft.view.plot import Figure


class Text(str):
    """A text of several lines that an interactive interpreter or a notebook shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class History(dict[str, list[float]]):
    """Metrics as columns. The error for an unknown name names the nearest metrics."""

    def __missing__(self, name: str) -> list[float]:
        nearest = [other for other in self if name in other][:3] or get_close_matches(name, self, n=3)
        hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
        raise KeyError(f"the run has not logged {name!r}{hint}")


class Run:
    """A training run: its status, metrics, responses and checkpoints.

    `camshaft.train`, `camshaft.sft`, `camshaft.reward_model` and `camshaft.load_run` return it. The files of the run
    are read when they are needed, so a run that is still training can be observed.
    """

    def __init__(self, folder: str | Path, launch: Launch | None = None):
        self.folder = Path(folder).expanduser()
        self._files, self._launch = RunFolder(self.folder), launch
        if not any((self.folder / name).is_file() for name in (INFO, METRICS)):
            raise ConfigError(
                f"{self.folder} is not the folder of a run (it contains no {INFO}); set the folder that the run "
                "printed at its start"
            )

    # -- state ----------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """Config keys of the run and their values. Secrets are replaced by `***`."""
        return self._files.config()

    @property
    def status(self) -> State:
        """State of the run: "running", "finished", "failed", "stopped" (by Ctrl-C or a signal) or "killed".

        It is "unknown" if no file describes the run, as in the folder of an earlier version of camshaft.
        """
        return self._files.state()

    @property
    def error(self) -> str | None:
        """Message of the error that ended the run, or None if the run has not failed."""
        return self._files.info().get("error")

    @property
    def history(self) -> dict[str, list[float]]:
        """All metrics as columns: a list of values per metric, and the column `step`.

        A metric without a value at a step, such as a validation metric, is NaN there.
        """
        metrics = self._metrics()
        columns = {name: list(metrics.column(name)) for name in metrics.names}
        return History({"step": list(metrics.steps), **columns})

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """Return the metrics of a step, by default of the last one."""
        metrics = self._metrics()
        return metrics.at(_pick(step, metrics.steps, f"{self.folder} has no metrics"))

    def responses(self, step: int | None = None, *, validation: bool = False) -> list[dict[str, Any]]:
        """Return the stored responses of a step, by default of the last one with responses.

        Each is a dict with `prompt`, `response`, `ground_truth` and `score`. Training responses also have `advantage`
        and the other columns of [run folders](run-folder.md).

        Args:
            step: Step of the responses.
            validation: Return responses to validation prompts instead of training prompts.
        """
        files = self._files
        if validation:
            return files.validation(_pick(step, files.validation_steps(), f"{self.folder} has no validation responses"))
        stored = f"{self.folder} has no responses; they are stored if trainer.samples.enable=true"
        return files.samples(_pick(step, files.sample_steps(), stored)).to_pylist()

    # -- results --------------------------------------------------------------------------------------

    def plot(self, path: str | Path | None = None, *, metrics: Sequence[str] = ()) -> Figure:
        """Plot the curves of the run with matplotlib, and return the figure, which a notebook shows.

        Args:
            path: File to write the figure to, for example curves.png.
            metrics: Names of metrics to plot, instead of the most common ones.
        """
        from camshaft.view.plot import DPI, draw

        figure = draw([self._files], metrics)
        if path is not None:
            figure.savefig(path, dpi=DPI)
        return figure

    def compare(self, *others: Run) -> Text:
        """Return the differences of this run and others as a table: config, versions and metrics."""
        return Text(compare(self._files, *(other._files for other in others)))

    def export(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        role: str | None = None,
        adapter: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
        force: bool = False,
    ) -> Path:
        """Export the model of a checkpoint as a Hugging Face folder, verify it, and return the folder.

        `camshaft export` calls the same function.

        Args:
            path: Folder to write.
            step: Step of the checkpoint, by default the newest one.
            role: Role to export, by default the policy, or the only model of the run.
            adapter: Export only the LoRA adapter. By default, it is merged into the weights.
            dtype: Dtype of the weights.
            force: Replace an older export. Folders with other contents are never replaced.
        """
        steps = self._checkpoints()
        checkpoint = steps[_pick(step, steps, f"{self.folder} contains no checkpoint; set trainer.save_freq")]
        source = self.folder if step is None and role is None else checkpoint if role is None else checkpoint / role
        from camshaft.runs.export import ExportOptions, export_checkpoint

        export_checkpoint(source, Path(path), ExportOptions(adapter=adapter, dtype=dtype, force=force))
        return Path(path).expanduser()

    def resume(
        self,
        steps: int | None = None,
        *,
        reward: Callable[..., Any] | Sequence[Any] | None = None,
        on_step: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        environment: Any = None,
        agent: Any = None,
        tools: Any = None,
        **keys: Any,
    ) -> Run:
        """Continue the run from its newest checkpoint, and return it.

        Args:
            steps: New number of training steps in total.
            reward: Reward function, as in `camshaft.train`. It is required if the run had a Python function and this
                object comes from `camshaft.load_run`.
            on_step: Hooks, as in `camshaft.train`. None keeps those of this object.
            environment: Environment, as in `camshaft.train`. It is required in the same case as `reward`.
            agent: Program, as in `camshaft.train`. It is required in the same case as `reward`.
            tools: Functions that the policy calls, as in `camshaft.train`. They are required in the same case.
            **keys: Short names and config keys with new values.
        """
        if not self._checkpoints():
            raise ConfigError(
                f"{self.folder} contains no checkpoint to resume from; set trainer.save_freq when you start a run"
            )
        from camshaft.runs.start import resume

        values = keys if steps is None else {**keys, "steps": steps}
        changed = Launch(self._command(), values, reward, as_hooks(on_step), environment, agent, tools)
        return Run(*resume(self.folder, self._launch or self._recorded_launch(changed), changed))

    # -- display --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return the status, the error of a failed run, and the most important metrics as a table."""
        metrics = self._files.metrics
        metrics.poll()
        rows = []
        for name in HEADLINES:
            values = [value for value in metrics.series(name)[1] if math.isfinite(value)]
            if values:
                rows.append((name, format_number(values[0]), format_number(values[-1])))
        lines = [f"Run({str(self.folder)!r})", f"{self.status}, step {metrics.last_step}"]
        if self.error is not None:
            lines.append(self.error)
        if rows:
            lines.append(table([("metric", "first", "last"), *rows]))
        return "\n".join(lines)

    # -- files ----------------------------------------------------------------------------------------

    def _command(self) -> Command:
        command = self._files.info().get("command")
        if command is None:
            raise ConfigError(f"{self.folder} has no {INFO} with the config of the run; start it again to resume it")
        if command == "serve":
            raise ConfigError(
                f"{self.folder} is a model of a server; start camshaft serve again, or load saved weights in the script"
            )
        return command

    def _recorded_launch(self, changed: Launch) -> Launch:
        """Return how to start a run that another process has started. Its Python objects are those of `changed`."""
        name = str(self.config.get("custom_reward_function.name") or "")
        if name.startswith(PYTHON) and changed.reward is None:
            raise ConfigError(
                f"the reward of {self.folder} was the Python function '{name.removeprefix(PYTHON)}', which is not "
                "stored; pass it as resume(reward=...)"
            )
        from camshaft.config.schema.agents import AGENT_KEY, KEY, TOOLS_KEY

        passed_objects = (
            (KEY, "environment", changed.environment),
            (AGENT_KEY, "agent", changed.agent),
            (TOOLS_KEY, "tools", changed.tools),
        )
        for key, name, passed in passed_objects:
            if PYTHON in str(self.config.get(f"actor_rollout_ref.rollout.{key}") or "") and passed is None:
                raise ConfigError(
                    f"the {name} of {self.folder} was a Python object, which is not stored; pass it as "
                    f"resume({name}=...)"
                )
        hidden = [key for key, value in self.config.items() if HIDDEN in str(value) and key not in changed.values]
        if hidden:
            raise ConfigError(
                f"{self.folder} does not store the secrets in {', '.join(hidden)}; pass these keys to resume"
            )
        from camshaft.runs.start import recorded_values

        return Launch(changed.command, recorded_values(changed.command, self.config))

    def _checkpoints(self) -> dict[int, Path]:
        return dict(storage.step_folders(self.folder))

    def _metrics(self) -> Metrics:
        metrics = self._files.metrics
        metrics.poll()
        if not metrics.steps:
            raise ConfigError(
                f"{self.folder} contains no metrics; the run has not finished a step, or trainer.logger does not "
                "contain jsonl"
            )
        return metrics


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Return the run in a folder."""
    return Run(Path(os.fspath(folder)))


def _pick(step: int | None, steps: Collection[int], none_message: str) -> int:
    """Return a step of `steps`, by default the last one."""
    if not steps:
        raise ConfigError(none_message)
    if step is None:
        return max(steps)
    if step not in steps:
        nearest = sorted(sorted(steps, key=lambda other: abs(other - step))[:4])
        raise ConfigError(f"step {step} is not available; the nearest steps are {', '.join(map(str, nearest))}")
    return step
