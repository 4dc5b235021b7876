"""A game on an environment server of OpenEnv."""

from openenv.core import GenericEnvClient


class Game:
    def __init__(self, url="http://127.0.0.1:8000"):
        self.client = GenericEnvClient(base_url=url).sync()

    def reset(self, ground_truth, seed):
        return self.client.reset(secret=int(ground_truth), seed=seed).observation["text"]

    def step(self, answer):
        result = self.client.step({"text": answer})
        return result.observation["text"] or None, result.reward, result.done
