"""How many ranks split a batch, and what one of them gets."""

from dataclasses import dataclass

from camshaft.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """`dp_size` ranks split every batch between them."""

    dp_size: int = 1

    def share(self, count_global: int, what: str) -> int:
        """One rank's part of a global count; an error where it does not come out even."""
        share, rest = divmod(count_global, self.dp_size)
        if rest or not share:
            raise ConfigError(f"{what}: {count_global} do not split evenly over {self.dp_size} ranks")
        return share


def micro_batch_per_rank(per_gpu: int | None, older_global: int, dp_size: int) -> int:
    """Sequences of one pass on one rank: `per_gpu` if set, else the rank's share of the older key's number."""
    return per_gpu if per_gpu is not None else Topology(dp_size).share(older_global, "sequences of a micro-batch")
