"""Guess a number from 1 to 9 with three tries."""


class HigherLower:
    def reset(self, ground_truth):
        self.secret, self.tries = int(ground_truth), 0
        return "Guess a number from 1 to 9."

    def step(self, answer):
        self.tries += 1
        if answer.strip() == str(self.secret):
            return None, 1.0, True
        return "higher" if answer.strip() < str(self.secret) else "lower", 0.0, self.tries == 3
