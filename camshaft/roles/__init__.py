"""Roles of a training run (actor, critic, reference, reward model, rollout) on the engine and rollout interfaces.

    actor.py         the trained policy: compute_log_prob, update_actor
    critic.py        the value function: compute_values, update_critic
    bypass.py        importance weights and rejection in the loss, for bypass mode
    token_selection.py  arguments of policy losses that select tokens
    exact_kl.py      exact KL between actor and reference over the vocabulary
    rollout.py       generation with the actor's weights: generate_sequences
    hybrid.py        ActorRolloutRefWorker, which combines actor, rollout and reference
    reward_model.py  frozen reward model: compute_rm_score
    reward_input.py  converts responses to token ids of a reward model
    served.py        engines of `camshaft serve`
    sampled.py       rollouts of `camshaft serve`
    generate.py      generation with the weights of a model folder, for `camshaft generate`
    supervised.py    base class of sft.py and rm.py with one optimizer step per batch: train_batch
    sft.py           model of supervised fine-tuning
    rm.py            trained reward model: compute_scores
    worker_class.py  loads custom role classes that the config names
    sequences.py     rows of a batch that are several sequences for the model
    base.py          base classes, engine columns, mini-batches, metrics of an update

A role defines the columns that it reads and writes, its epochs, mini-batches, loss and metrics. A controller calls the
registered methods of a role on all ranks. Direct calls in a single process return the same results.
"""

from camshaft.roles.actor import ActorWorker, RefWorker
from camshaft.roles.base import token_columns
from camshaft.roles.critic import CriticWorker
from camshaft.roles.generate import GenerateWorker
from camshaft.roles.hybrid import ActorRolloutRefWorker
from camshaft.roles.reward_model import REWARD_METHODS, RewardModelWorker
from camshaft.roles.rm import RMWorker
from camshaft.roles.rollout import RolloutWorker
from camshaft.roles.sft import SFTWorker
from camshaft.roles.supervised import SupervisedWorker
from camshaft.roles.worker_class import load_worker_class

__all__ = [
    "REWARD_METHODS", "ActorRolloutRefWorker", "ActorWorker", "CriticWorker", "GenerateWorker", "RMWorker", "RefWorker",
    "RewardModelWorker", "RolloutWorker", "SFTWorker", "SupervisedWorker", "load_worker_class",
    "token_columns",
]  # fmt: skip
