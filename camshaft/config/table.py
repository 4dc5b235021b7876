"""The batch sizes of a run in one table: what each number on the command line comes to.

    sys.stdout.write(render_batch_table(batch_table(config, topology)))

The trainer shows it at the start. Prompts become sequences, these mini-batches of one optimizer step each,
these the micro-batches that a rank computes at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from camshaft.config.derive import MicroBatch, actor_train, critic_infer, critic_train, log_prob, reward_infer
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.topology import Topology


@dataclass(frozen=True)
class BatchRow:
    """One line: a number of each role (None where it has none), and where it is from."""

    what: str
    actor: int | str
    ref: int | str | None
    critic: int | str | None
    reward: int | str | None
    how: str


def batch_table(config: PPOConfig, topology: Topology) -> list[BatchRow]:
    """The rows, from an iteration's prompts to its optimizer steps. Of a config that was checked.

    The reference has a column where it is a model of its own, and so has a reward model.
    """
    actor: dict[str, int | str] = {RANKS: config.actor_dp_size(topology)} | _column(
        config,
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
        config.actor_mini_batch_per_rank(topology),
        config.actor_rollout_ref.actor.ppo_epochs,
        (actor_train(config, topology), log_prob(config, topology, "rollout")),
    )
    ref: dict[str, int | str] = {}
    if config.needs_reference_model():
        ref = {RANKS: config.ref_dp_size(topology), FORWARD: _size(log_prob(config, topology, "ref"))}
    critic: dict[str, int | str] = {}
    if config.needs_critic():
        critic = {RANKS: config.critic_dp_size(topology)} | _column(
            config,
            config.critic.ppo_mini_batch_size,
            config.critic_mini_batch_per_rank(topology),
            config.critic.ppo_epochs,
            (critic_train(config, topology), critic_infer(config, topology)),
        )
    reward: dict[str, int | str] = {}
    if config.needs_reward_engine():
        reward = {RANKS: config.reward_dp_size(topology), FORWARD: _size(reward_infer(config, topology))}
    return [
        BatchRow(what, actor[what], ref.get(what), critic.get(what), reward.get(what), how)
        for what, how in _ROWS.items()
    ]


def render_batch_table(rows: Sequence[BatchRow]) -> str:
    """The table as text."""
    cells = [("", "actor", "ref", "critic", "reward", "")]
    cells += [
        (row.what, _cell(row.actor), _cell(row.ref), _cell(row.critic), _cell(row.reward), row.how) for row in rows
    ]
    if all(row.reward is None for row in rows):
        cells = [(*cell[:4], cell[5]) for cell in cells]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]) - 1)]
    lines = [
        "  ".join([f"{what:<{widths[0]}}", *(f"{n:>{w}}" for n, w in zip(numbers, widths[1:], strict=True)), how])
        for what, *numbers, how in cells
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cell(number: int | str | None) -> str:
    return "-" if number is None else str(number)


RANKS = "ranks with rows of their own"
FORWARD = "forward micro-batch per rank"
_ROWS = {
    RANKS: "ranks / (sequence x tensor parallel)",
    "prompts per iteration": "data.train_batch_size",
    "sequences per iteration": "prompts x rollout.n",
    "sequences per mini-batch": "ppo_mini_batch_size x rollout.n",
    "mini-batches per epoch": "sequences / mini-batch",
    "mini-batch per rank": "sequences of a mini-batch / ranks with rows of their own",
    "micro-batch per rank": "one forward and backward pass",
    "micro-batches per mini-batch": "passes of a rank for one optimizer step",
    FORWARD: "one pass that computes log-probs, values, or scores",
    "epochs": "ppo_epochs",
    "optimizer steps per iteration": "mini-batches x epochs",
}
"""What the rows are called, and the arithmetic behind them."""


def _column(
    config: PPOConfig, mini_prompts: int, mini_per_rank: int, epochs: int, passes: tuple[MicroBatch, MicroBatch]
) -> dict[str, int | str]:
    n, prompts = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    train, infer = passes
    mini_batches = prompts // mini_prompts
    values = [
        prompts,
        prompts * n,
        mini_prompts * n,
        mini_batches,
        mini_per_rank,
        _size(train),
        "by tokens" if train.sequences is None else -(-mini_per_rank // train.sequences),
        _size(infer),
        epochs,
        mini_batches * epochs,
    ]
    return dict(zip((what for what in _ROWS if what != RANKS), values, strict=True))


def _size(micro: MicroBatch) -> int | str:
    return f"{micro.tokens} tokens" if micro.sequences is None else micro.sequences
