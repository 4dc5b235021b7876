"""The guessing game as a taskset of verifiers, which knows nothing of camshaft."""

import verifiers.v1 as vf

__all__ = ["Guess", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 10):
            yield GuessTask(GuessData(prompt="Play. Guess a number from 1 to 9.", number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class Guess(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        number, reward = str(task.data.number), 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for tries in range(1, 4):
                answer = segment.last_reply
                if answer.strip() == number:
                    reward = 1.0
                if reward or tries == 3:
                    break
                segment = await interaction.turn("higher" if answer.strip() < number else "lower")
        interaction.trace.record_reward("guessed", reward, 1.0)
