"""The roles, written against the interfaces of engine and rollout.

    actor.py         the trained policy: compute_log_prob, update_actor
    critic.py        the value function: compute_values, update_critic
    exact_kl.py      KL divergence of actor and reference over the whole vocabulary
    rollout.py       generation with the actor's weights: generate_sequences
    hybrid.py        ActorRolloutRefWorker, which composes actor, rollout and reference
    reward_model.py  a model that scores responses: compute_rm_score
    reward_input.py  the token ids that a reward model reads
    generate.py      generation with the weights of a model folder, for `camshaft generate`
    supervised.py    base class of sft.py and rm.py: one optimizer step per batch, train_batch
    sft.py           the model of supervised fine-tuning
    rm.py            a reward model that is trained: compute_scores
    worker_class.py  role classes of your own, named in the config
    base.py          base classes, columns of sequences, mini-batches, metrics of an update

A role defines the columns that it reads and writes, epochs, mini-batches, loss and metrics. A controller calls its
registered methods on all ranks; called directly, in one process, they behave the same.
"""

from camshaft.roles.actor import ActorWorker, RefWorker
from camshaft.roles.critic import CriticWorker
from camshaft.roles.generate import GenerateWorker
from camshaft.roles.hybrid import ActorRolloutRefWorker
from camshaft.roles.reward_model import REWARD_METHODS, RewardModelWorker
from camshaft.roles.rm import RMWorker
from camshaft.roles.rollout import RolloutWorker
from camshaft.roles.sft import SFTWorker
from camshaft.roles.supervised import SupervisedWorker
from camshaft.roles.worker_class import worker_class

__all__ = [
    "REWARD_METHODS",
    "ActorRolloutRefWorker",
    "ActorWorker",
    "CriticWorker",
    "GenerateWorker",
    "RMWorker",
    "RefWorker",
    "RewardModelWorker",
    "RolloutWorker",
    "SFTWorker",
    "SupervisedWorker",
    "worker_class",
]
