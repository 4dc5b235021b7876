"""Rewards: user functions scored in isolated, time-limited processes.

    from camshaft.rewards.manager import RewardManager
    with RewardManager(path="my_reward.py", name="compute_score", timeout=5.0) as rewards:
        result = rewards.score(batch, tokenizer.batch_decode)

A reward function is `compute_score(data_source, solution_str, ground_truth, extra_info)`, plain or async,
and returns a number, or a dict with `score`, other numbers that are averaged into the metrics, and `pred`, the answer
that it found in the response.

`manager.py` is what the trainer uses, `pool.py` the processes, `worker.py` what runs in them, `wire.py` the
messages between. `auto.py`, `exact_match.py`, `gsm8k.py`, `arithmetic.py` are functions to choose by name.
This file is imported in each worker and must stay free of torch.
"""

REWARDS = {
    "auto": "camshaft.rewards.auto:compute_score",
    "exact_match": "camshaft.rewards.exact_match:compute_score",
    "gsm8k": "camshaft.rewards.gsm8k:compute_score",
    "arithmetic": "camshaft.rewards.arithmetic:compute_score",
}
"""Reward functions by name; entry points of the group `camshaft.rewards` are added to these."""

GROUP = "camshaft.rewards"
