"""Environments in the form that TRL prescribes for `environment_factory`, which import neither TRL nor camshaft."""


class Counter:
    """Tools that change a state, and a score of its own."""

    def reset(self, target: int, **kwargs) -> str:
        self.total, self.target = 0, target
        return f" Reach {target}."

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: Number to add.

        Returns:
            The counter.
        """
        self.total += amount
        return f"the counter is {self.total}"

    def double(self) -> int:
        """Double the counter.

        Returns:
            The counter.
        """
        self.total *= 2
        return self.total

    def get_reward(self) -> float:
        return float(self.total == self.target)


class Notes:
    """Asynchronous tools, an observation that is left out, and a score in an attribute."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> None:
        self.reward, self.notes = 0.0, {}

    async def write(self, name: str, text: str) -> str:
        """Write a note.

        Args:
            name: Name of the note.
            text: Text of the note.

        Returns:
            Whether it was new.
        """
        is_new = name not in self.notes
        self.notes[name] = text
        self.reward += 0.25
        return "written" if is_new else "replaced"

    async def read(self, name: str) -> str:
        """Read a note.

        Args:
            name: Name of the note.

        Returns:
            Text of the note.
        """
        self.reward += 0.5
        return self.notes[name]


class Shop:
    """A score as a property, and a tool that returns a list as text."""

    def reset(self, target: int, **kwargs) -> str:
        self.left, self.basket = target, []
        return f"\nYou have {target} coins."

    def buy(self, item: str, price: int = 1) -> str:
        """Buy an item.

        Args:
            item: What to buy.
            price: What it costs.

        Returns:
            The basket.
        """
        self.left -= price
        self.basket.append(item)
        return ", ".join(self.basket)

    def _value(self) -> float:
        return len(self.basket) / 4 if self.left >= 0 else -1.0

    @property
    def reward(self) -> float:
        return self._value()
