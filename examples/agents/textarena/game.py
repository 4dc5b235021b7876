"""A game of TextArena as an environment."""

import textarena


class Game:
    def __init__(self, name="TowerOfHanoi-v0"):
        self.name = name

    def reset(self, seed):
        self.env, self.text = textarena.make(self.name), ""
        self.env.reset(num_players=1, seed=seed)
        return self._observe()

    def step(self, answer):
        done, _ = self.env.step(answer)
        return (None, float(self.env.close()[0][0]), True) if done else (self._observe(), 0.0, False)

    def _observe(self):
        """Return what is new in the observation, which contains the earlier ones."""
        _, text = self.env.get_observation()
        new, self.text = text[len(self.text) :], text
        return new
