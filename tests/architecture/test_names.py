"""Public names that other packages rely on, and the terms of the specification."""

import importlib
import inspect

import pytest

from camshaft.engine.base import BaseEngine

SPECIFIED = {
    "init_model": "(self)",
    "train_mode": "(self)",
    "eval_mode": "(self)",
    "forward_backward_step": "(self, batch, ctx=None, forward_only=False, preprocess_fn=None, postprocess_fn=None)",
    "optimizer_zero_grad": "(self)",
    "optimizer_step": "(self, hyperparameters=None)",
    "lr_scheduler_step": "(self)",
    "shard_data": "(self, data)",
    "unshard_data": "(self, data)",
    "set_loss_fn": "(self, loss_fn)",
    "to": "(self, device, model=True, optimizer=True)",
    "save_checkpoint": "(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)",
    "load_checkpoint": "(self, local_path, hdfs_path=None, del_local_after_load=True)",
}

PUBLIC = {
    "camshaft.dataproto": {"DataProto", "Ragged"},
    "camshaft.engine": {
        *("BaseEngine", "EngineConfig", "EngineModel", "OptimConfig", "StepContext", "StepResult"),
        *("build_engine", "ENGINES"),
    },
    "camshaft.rollout": {"BaseRollout", "SamplingParams", "Generation", "build_rollout", "ROLLOUTS"},
    "camshaft.controller": {"Dispatch", "Worker", "WorkerGroup", "register", "spawn"},
    "camshaft.roles": {
        *("ActorRolloutRefWorker", "ActorWorker", "CriticWorker", "RefWorker", "RewardModelWorker", "RolloutWorker")
    },
    "camshaft.config": {"PPOConfig", "SFTConfig", "load_ppo", "load_sft"},
    "camshaft.reshard": {"rollout_mode", "enter", "leave", "sync_weights"},
    "camshaft.rewards.manager": {"RewardManager", "RewardResult"},
    "camshaft.tracking": {"Tracking", "Tracker"},
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_engine_method_has_the_specified_signature(name: str) -> None:
    signature = inspect.signature(getattr(BaseEngine, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SPECIFIED[name]


def test_all_specified_methods_are_abstract() -> None:
    assert set(SPECIFIED) <= BaseEngine.__abstractmethods__


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_exported(module: str) -> None:
    imported = importlib.import_module(module)
    assert PUBLIC[module] <= set(dir(imported))
    missing = set(getattr(imported, "__all__", [])) - set(dir(imported))
    assert not missing, f"{module}.__all__ names what is not there: {missing}"


ROLE_METHODS = {
    "ActorRolloutRefWorker": {
        "init_model": "ONE_TO_ALL",
        "set_environments": "ONE_TO_ALL",
        "sync_weights": "ALL_TO_ALL",
        "weight_dtypes": "ONE_TO_ALL",
        "set_readers": "ONE_TO_ALL",
        "publish": "ALL_TO_ALL",
        "publish_base": "ALL_TO_ALL",
        "portable_snapshot": "RANK_ZERO",
        "generate_sequences": "DP_COMPUTE_PROTO",
        "sleep_rollout": "ONE_TO_ALL",
        "compute_log_prob": "DP_COMPUTE_PROTO",
        "compute_ref_log_prob": "DP_COMPUTE_PROTO",
        "update_actor": "DP_COMPUTE_PROTO",
        "save_checkpoint": "ONE_TO_ALL",
        "wait_for_checkpoint": "ONE_TO_ALL",
        "load_checkpoint": "ONE_TO_ALL",
        "export": "ONE_TO_ALL",
        "skipped_steps": "ALL_TO_ALL",
        "has_finite_outputs": "ALL_TO_ALL",
    },
    "CriticWorker": {
        "init_model": "ONE_TO_ALL",
        "compute_values": "DP_COMPUTE_PROTO",
        "update_critic": "DP_COMPUTE_PROTO",
        "save_checkpoint": "ONE_TO_ALL",
        "wait_for_checkpoint": "ONE_TO_ALL",
        "load_checkpoint": "ONE_TO_ALL",
        "export": "ONE_TO_ALL",
        "skipped_steps": "ALL_TO_ALL",
        "has_finite_outputs": "ALL_TO_ALL",
    },
    "RewardModelWorker": {
        "init_model": "ONE_TO_ALL",
        "compute_rm_score": "DP_COMPUTE_PROTO",
        "save_checkpoint": "ONE_TO_ALL",
        "wait_for_checkpoint": "ONE_TO_ALL",
        "load_checkpoint": "ONE_TO_ALL",
    },
}


@pytest.mark.parametrize("role", ROLE_METHODS)
def test_roles_offer_the_specified_methods_in_the_specified_modes(role: str) -> None:
    from camshaft import roles
    from camshaft.controller.worker import registered_methods

    assert {name: mode.name for name, mode in registered_methods(getattr(roles, role)).items()} == ROLE_METHODS[role]
