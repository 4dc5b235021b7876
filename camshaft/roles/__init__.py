"""The roles, each riding on an engine or a rollout of which it sees the interface.

    actor.py    the policy that is trained: compute_log_prob, update_actor
    critic.py   the value function: compute_values, update_critic
    ref.py      the policy that the KL is measured from: compute_ref_log_prob
    exact_kl.py actor against reference over the whole vocabulary
    reward_model.py  a model that scores responses: compute_rm_score; reward_input.py what it reads of them
    rollout.py  generation with the actor's weights: generate_sequences
    generate.py generation with the weights of a folder, for `camshaft generate`
    hybrid.py   ActorRolloutRefWorker, which composes actor, rollout and reference
    supervised.py   one optimizer step a batch: train_batch
    sft.py      the model of supervised fine-tuning; rm.py a reward model that is trained: compute_scores
    base.py     what roles share: sequences, mini-batches, metrics

A role owns which columns it reads and writes, how many epochs and mini-batches, the loss, the metrics. A
controller calls its registered methods; called directly in one process they do the same.
"""

from camshaft.roles.actor import ActorWorker
from camshaft.roles.critic import CriticWorker
from camshaft.roles.generate import GenerateWorker
from camshaft.roles.hybrid import ActorRolloutRefWorker
from camshaft.roles.ref import RefWorker
from camshaft.roles.reward_model import RewardModelWorker, reward_worker
from camshaft.roles.rm import RMWorker
from camshaft.roles.rollout import RolloutWorker
from camshaft.roles.sft import SFTWorker
from camshaft.roles.supervised import SupervisedWorker

__all__ = [
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
    "reward_worker",
]
