"""Checks of what one run needs: config, models, tokenizer, data, reward, libraries, ports, disk space and memory.

    for name, check in run_checks(config).items():
        findings += collect({name: check}, seconds=120.0)

The checks use the functions that the run itself uses, so their messages are those of the run.
"""

import math
import re
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from camshaft import hub
from camshaft.config import PPOConfig
from camshaft.config.checks.backends import check_libraries
from camshaft.config.composition import as_override
from camshaft.config.model_settings import local_model
from camshaft.config.schema.model import AnyModelConfig, ModelSource
from camshaft.controller.placement import check_device, pool_specs
from camshaft.controller.ray_cluster import find_cluster, head_may_answer
from camshaft.data import data_files, read_prompts, summarize_files
from camshaft.engine.optim import optimizer_class
from camshaft.errors import CamshaftError
from camshaft.machine import available_memory, memory_limit
from camshaft.models.loader import has_tokenizer, load_tokenizer
from camshaft.planning.doctor.findings import Check, Finding, collect, fail, ok, warn
from camshaft.planning.doctor.imports import installed_versions
from camshaft.planning.doctor.machine import (
    check_cpu,
    check_disks,
    check_folder,
    existing_parent,
    machine_checks,
)
from camshaft.planning.doctor.weights import read_shapes
from camshaft.planning.generator import snapshots_size
from camshaft.planning.plan_process import PlanUnavailable, plan_in_process
from camshaft.rollout import HostMemory
from camshaft.storage import is_url
from camshaft.trainer.build import prompt_files, prompt_options
from camshaft.trainer.scoring import build_rewards

SAMPLE_ROWS = 64
"""Number of rows of each data set that are tokenized."""
MACHINE_SECONDS = 30.0
"""Time limit for the checks of another machine."""
FORECAST_SECONDS = 60.0
"""Time limit of the forecast of the memory."""
BYTES_PER_PARAMETER = 12
"""Size of a checkpoint per trained parameter: float32 weights and two moments."""
MIN_SAVES = 10
"""Number of saves that the free space must hold if a run keeps all checkpoints."""


def run_checks(config: PPOConfig, overrides: Sequence[str] | None = None) -> dict[str, Check]:
    """Return all checks of a run. Its memory is forecast if `overrides` are the arguments of this run alone."""
    folder = Path(config.trainer.default_local_dir)
    return {
        "config": lambda: [ok("config", "the config is valid")],
        "run folder": partial(check_folder, folder),
        "disk": partial(check_disks, folder),
        "cpu": partial(check_cpu, sum(spec.ranks_per_node for spec in pool_specs(config))),
        "models": partial(check_models, config),
        "tokenizer": partial(check_tokenizer, config),
        "data": partial(check_data, config),
        "reward": partial(check_reward, config),
        "libraries": partial(check_backends, config),
        "ports": partial(check_ports, config),
        "checkpoints": partial(check_checkpoint_space, config),
        "machines": partial(check_machines, config),
        "snapshot": partial(check_snapshot, config),
        "forecast": partial(check_forecast, config, overrides),
    }


# -- models and data ------------------------------------------------------------------------------


def check_models(config: PPOConfig) -> Iterator[Finding]:
    for key, model in _models(config).items():
        yield from check_model(key, model.path)


def check_model(key: str, path: str) -> Iterator[Finding]:
    """Compare the weight files of a model with their headers and with the index."""
    folder = local_model(path)
    if folder is None:
        if hub.is_model_name(path) or is_url(path):
            download = f"copy {path} to this machine" if is_url(path) else f"hf download {path}"
            yield warn("models", f"{key}={path} is not on this machine yet, so it is not checked", download)
        else:
            yield fail("models", f"{key}={path} does not exist on this machine", f"copy {path} to this machine")
        return
    problems, shapes = read_shapes(folder)
    if not (folder / "config.json").is_file():
        problems.append(f"{folder} has no config.json")
    for problem in problems:
        yield fail("models", f"{key}={path}: {problem}", f"copy or download {folder} again")
    if not problems:
        count = sum(map(math.prod, shapes.values()))
        kind = f"{count:,} parameters in safetensors files" if shapes else "no safetensors files"
        yield ok("models", f"{key}={path}: {kind}")


def _models(config: PPOConfig) -> dict[str, ModelSource]:
    """Return the models of a run that are loaded from files, by config key."""
    models: dict[str, ModelSource] = {}
    if not config.actor_rollout_ref.model.random_init:
        models["actor_rollout_ref.model.path"] = config.actor_rollout_ref.model
    if config.needs_critic():
        models["critic.model.path"] = config.critic.model
    if config.needs_reward_engine():
        models["reward_model.model.path"] = config.reward_model.model
    return models


def check_tokenizer(config: PPOConfig) -> Iterator[Finding]:
    """Load the tokenizer of the policy."""
    path = config.tokenizer_path()
    folder = local_model(path)
    if folder is not None and not has_tokenizer(folder):
        message = f"{path} has neither tokenizer.json nor tokenizer_config.json"
        yield fail("tokenizer", message, "set data.tokenizer=FOLDER, or copy the tokenizer files of the base model")
        return
    try:
        tokenizer: Any = load_tokenizer(path, config.data.trust_remote_code, config.data.chat_template)
    except CamshaftError as error:
        yield fail("tokenizer", str(error), "set data.tokenizer=FOLDER")
        return
    yield ok("tokenizer", f"{path}: {len(tokenizer):,} tokens")


def check_data(config: PPOConfig) -> Iterator[Finding]:
    """Read the columns of the data files, and tokenize the first rows."""
    for name, train in (("training", True), ("validation", False)):
        paths, _ = prompt_files(config, train)
        if not paths:
            continue
        try:
            files = data_files(paths)
            rows = sum(file.num_rows for file in summarize_files(files, ()))
            tokenizer: Any = load_tokenizer(
                config.tokenizer_path(), config.data.trust_remote_code, config.data.chat_template
            )
            read_prompts(files, tokenizer, prompt_options(config), SAMPLE_ROWS)
        except (CamshaftError, OSError) as error:
            keys = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
            words = [as_override(key, value) for key, value in keys.items() if value]
            yield fail("data", f"{name} data: {error}", f"{shlex.join(['camshaft', 'check-data', *words])} ...")
            continue
        yield ok("data", f"{name} data: {rows:,} rows in {len(files)} files")


def check_reward(config: PPOConfig) -> Iterator[Finding]:
    """Load the reward function in a process, as a run does."""
    custom = config.custom_reward_function
    if not config.needs_function():
        yield ok("reward", "the run uses no reward function")
        return
    functions = custom.selected()
    source = ", ".join(dict.fromkeys(function.path or "built-in function" for function in functions))
    try:
        with build_rewards(custom) as rewards:
            names = rewards.names
    except CamshaftError as error:
        yield fail("reward", f"{source}: {error}", f"python {functions[0].path}" if functions[0].path else "")
        return
    yield ok("reward", f"loaded {', '.join(names)}")


# -- backends and resources -----------------------------------------------------------------------


def check_backends(config: PPOConfig) -> Iterator[Finding]:
    """Check that the libraries and the devices of the run exist on this machine."""
    trainer = config.trainer
    rollout, strategy = config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.actor.strategy
    ranks = sum(spec.world_size for spec in pool_specs(config))
    check_libraries(config)  # `collect` reports an error as a finding
    optimizers = [config.actor_rollout_ref.actor.optim, *([config.critic.optim] if config.needs_critic() else [])]
    for optim in optimizers:
        optimizer_class(optim.optimizer)
    if trainer.backend() == "local":
        check_device(trainer.device, ranks)
    yield ok("libraries", f"engine {strategy}, rollout {rollout}, {ranks} ranks on {trainer.device}")


def check_ports(config: PPOConfig) -> Iterator[Finding]:
    """Check that the ports of a new Ray cluster are free, or that the existing cluster answers."""
    if config.trainer.backend() != "ray":
        yield ok("ports", "the run uses no fixed port")
        return
    ray_init = config.ray_kwargs.ray_init
    cluster = find_cluster(ray_init)
    address = cluster.address
    if not cluster.starts:
        if head_may_answer(address):
            yield ok("ports", f"the Ray cluster at {address} answers")
        else:
            yield fail("ports", f"no Ray cluster answers at {address}", "ray start --head")
        return
    ports = {key: value for key, value in ray_init.items() if key.endswith("port") and isinstance(value, int) and value}
    used = {key: port for key, port in ports.items() if not _is_free(port)}
    for key, port in used.items():
        fix = f"ss -ltnp 'sport = :{port}', or set ray_kwargs.ray_init.{key} to another port"
        yield fail("ports", f"ray_kwargs.ray_init.{key}={port} is in use by another process", fix)
    if not used:
        yield ok("ports", "the run starts a Ray cluster on free ports")


def check_machines(config: PPOConfig) -> Iterator[Finding]:
    """Check each machine of an existing Ray cluster: limits, disks, versions of packages and model files."""
    ray_init = config.ray_kwargs.ray_init
    if config.trainer.backend() != "ray":
        return
    cluster = find_cluster(ray_init)
    if cluster.starts or not head_may_answer(cluster.address):
        return
    from camshaft.controller.ray import run_on_nodes

    models = {key: model.path for key, model in _models(config).items()}
    arguments = (Path(config.trainer.default_local_dir), models)
    versions = installed_versions()
    for machine, result in run_on_nodes(ray_init, inspect_machine, arguments, MACHINE_SECONDS).items():
        if isinstance(result, Exception):
            lines = str(result).strip().splitlines()
            fix = f"ssh {machine} camshaft doctor"
            yield fail("machines", f"{machine}: {lines[-1] if lines else type(result).__name__}", fix)
            continue
        findings, remote_versions = result
        problems = [finding for finding in findings if finding.status != "OK"]
        for finding in problems:
            yield Finding("machines", finding.status, f"{machine}: {finding.check}: {finding.message}", finding.fix)
        for name in sorted(versions.keys() | remote_versions.keys()):
            here, there = versions.get(name, "missing"), remote_versions.get(name, "missing")
            if here != there:
                message = f"{machine}: {name} is {there}, and {here} on this machine"
                remote, version = (f"ssh {machine} ", here) if name in versions else ("", there)
                fix = f"{remote}pip install {name}=={version}"
                yield warn("machines", message, "install the same Python on both" if name == "python" else fix)
        if not problems:
            yield ok("machines", f"{machine}: no problem")


def inspect_machine(folder: Path, models: Mapping[str, str]) -> tuple[list[Finding], dict[str, str]]:
    """Check this machine and its copies of the models. Return the findings and the versions of its packages."""
    findings = collect(machine_checks(folder), MACHINE_SECONDS)
    findings += [finding for key, path in models.items() for finding in check_model(key, path)]
    return findings, installed_versions()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_checkpoint_space(config: PPOConfig) -> Iterator[Finding]:
    """Compare the size of the checkpoints that are kept with the free space."""
    trainer = config.trainer
    if trainer.save_freq == -1:
        yield ok("checkpoints", "the run saves no checkpoints (trainer.save_freq=-1)")
        return
    models: list[tuple[AnyModelConfig, int | None]] = [(config.actor_rollout_ref.model, trainer.max_actor_ckpt_to_keep)]
    if config.needs_critic():
        models.append((config.critic.model, trainer.max_critic_ckpt_to_keep))
    sizes = [(BYTES_PER_PARAMETER * _trained_parameters(model), keep) for model, keep in models]
    one = sum(size for size, _ in sizes)
    # A checkpoint is complete before the oldest one is deleted.
    kept = sum(size * (keep + 1) for size, keep in sizes if keep is not None)
    each_save = sum(size for size, keep in sizes if keep is None)
    free = shutil.disk_usage(existing_parent(Path(trainer.default_local_dir))).free
    need = f"the kept ones need {_gib(kept)}, " if kept else ""
    growth = f"each save adds {_gib(each_save)} because all are kept, " if each_save else ""
    message = f"a checkpoint takes {_gib(one)}, {need}{growth}and {_gib(free)} are free"
    fix = "set trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1, or trainer.default_local_dir=FOLDER"
    if free < one:
        yield fail("checkpoints", message, fix)
    elif free < kept + MIN_SAVES * each_save:
        yield warn("checkpoints", message, fix)
    else:
        yield ok("checkpoints", message)


def check_snapshot(config: PPOConfig) -> Iterator[Finding]:
    """Compare the size of the weights for a rollout on devices of its own with the free memory of this machine."""
    policy = config.actor_rollout_ref
    if policy.hybrid_engine:
        yield ok("snapshot", "the rollout is on the devices of the actor")
        return
    folder = local_model(policy.model.path)
    if folder is None:
        yield ok("snapshot", f"{policy.model.path} is not on this machine yet, so its size is unknown")
        return
    size, free = snapshots_size(config), available_memory()
    memory = HostMemory()
    try:
        memory.extend(size)
    except OSError as error:
        message = f"shared memory of {_gib(size)} for the weights of the rollout cannot be mapped: {error}"
        yield fail("snapshot", message, "raise the limits of memory and of file sizes (ulimit -v, ulimit -f)")
        return
    finally:
        memory.close()
    message = f"the weights for the rollout need {_gib(size)} of host memory, and {_gib(free)} are free"
    fix = "set actor_rollout_ref.hybrid_engine=true and max_staleness=0, or use a machine with more memory"
    yield ok("snapshot", message) if size < free else fail("snapshot", message, fix)


def check_forecast(config: PPOConfig, overrides: Sequence[str] | None) -> Iterator[Finding]:
    """Compare the memory that `camshaft plan` forecasts with the free memory."""
    if overrides is None:
        yield ok("forecast", "the memory of a sweep is not forecast")
        return
    free = available_memory() if config.trainer.device == "cpu" else None
    try:
        plan = plan_in_process(overrides, free, FORECAST_SECONDS)
    except PlanUnavailable as reason:
        yield ok("forecast", f"the memory is not forecast: {reason}")
        return
    row, memory = plan["tightest"], plan["memory"]
    message = f"{row['phase']} of {row['role']} needs {_gib(row['peak'])} of tensors on each rank"
    if row["peak"] <= memory:
        yield ok("forecast", f"{message}, and {_gib(memory)} are free")
        return
    fix = f"add {' '.join(plan['change'])}" if "change" in plan else shlex.join(["camshaft", "plan", *overrides])
    if free is not None and row["peak"] <= memory * memory_limit() / free:
        yield warn("forecast", f"{message}, and other processes leave {_gib(memory)}", fix)
    else:
        yield fail("forecast", f"{message}, which has {_gib(memory)}", fix)


def _trained_parameters(model: AnyModelConfig) -> int:
    """Return the number of parameters in a checkpoint of a model; 0 if the model is not on this machine.

    With LoRA, each matrix except for embeddings and output head counts as adapted, so the number is an upper bound.
    """
    folder = local_model(model.path)
    shapes = {} if folder is None else read_shapes(folder)[1]
    if not model.lora_rank:
        return sum(map(math.prod, shapes.values()))
    excluded = re.compile("embed|lm_head")
    matrices = (shape for name, shape in shapes.items() if len(shape) == 2 and not excluded.search(name))
    return sum(model.lora_rank * sum(shape) for shape in matrices)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
