"""The guessing game as an environment server of OpenEnv.

uvicorn server:app --port 8000
"""

from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Reply(Observation):
    text: str = ""


class HigherLower(Environment[Guess, Reply, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, secret: int = 5, **_: Any) -> Reply:
        self.secret, self.tries = secret, 0
        return Reply(text="Guess a number from 1 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Reply:
        self.tries += 1
        guess = action.text.strip()
        if guess == str(self.secret):
            return Reply(reward=1.0, done=True)
        text = "higher" if guess < str(self.secret) else "lower"
        return Reply(text=text, reward=0.0, done=self.tries == 3)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


app = create_fastapi_app(HigherLower, Guess, Reply, max_concurrent_envs=256)
