"""Episodes: conversations of the policy with an environment, each of which becomes one row of a batch.

    episodes = play(rollout, Host({"": HigherLower}), questions, Bridge(tokenizer), limits, sampling)
    episodes[0].tokens, episodes[0].mask        # the mask is true for tokens that the policy sampled

environment.py  what an environment is, its calls, and a host of the environments of several episodes
bridge.py       the tokens that a chat template writes between two answers
episode.py      an episode, whose tokens are only ever appended
play.py         play episodes over any rollout, within limits

The package imports nothing, because the processes of environments import `environment.py` without torch.
"""
