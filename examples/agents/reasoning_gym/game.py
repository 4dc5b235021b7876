"""A task of reasoning-gym as an environment: a wrong answer gets a second try."""

import reasoning_gym


class Task:
    def __init__(self, name="chain_sum"):
        self.name = name

    def reset(self, seed):
        self.data = reasoning_gym.create_dataset(self.name, size=1, seed=seed)
        self.entry, self.tries = self.data[0], 0
        return self.entry["question"]

    def step(self, answer):
        self.tries += 1
        score = self.data.score_answer(answer.strip(), self.entry)
        done = score == 1 or self.tries == 2
        return "This is wrong. Try again.", score if done else 0.0, done
