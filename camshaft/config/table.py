"""Table of the batch sizes of a run, per role.

    sys.stdout.write(render_batch_table(batch_table(config, topology)))

The trainer logs it at startup. Prompts become sequences, sequences form mini-batches (one optimizer step each), and
mini-batches are split into the micro-batches of one forward pass on a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from camshaft.config.derive import MicroBatch, actor_train, critic_infer, critic_train, log_prob, reward_infer
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.topology import Topology


@dataclass(frozen=True)
class BatchRow:
    """One row: its name, a value per role (None if the role has none), and the formula."""

    name: str
    actor: int | str
    ref: int | str | None
    critic: int | str | None
    reward: int | str | None
    formula: str


def batch_table(config: PPOConfig, topology: Topology) -> list[BatchRow]:
    """Return the rows, from the prompts of an iteration to its optimizer steps. `config` must be valid.

    The reference and the reward model have a column if the run has a separate engine for them.
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
        BatchRow(name, actor[name], ref.get(name), critic.get(name), reward.get(name), formula)
        for name, formula in _ROWS.items()
    ]


def render_batch_table(rows: Sequence[BatchRow]) -> str:
    """Format the table as text."""
    cells = [("", "actor", "ref", "critic", "reward", "")]
    cells += [
        (row.name, _cell(row.actor), _cell(row.ref), _cell(row.critic), _cell(row.reward), row.formula) for row in rows
    ]
    if all(row.reward is None for row in rows):
        cells = [(*cell[:4], cell[5]) for cell in cells]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]) - 1)]
    lines = [
        "  ".join([f"{name:<{widths[0]}}", *(f"{n:>{w}}" for n, w in zip(numbers, widths[1:], strict=True)), formula])
        for name, *numbers, formula in cells
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cell(number: int | str | None) -> str:
    return "-" if number is None else str(number)


RANKS = "data-parallel ranks"
FORWARD = "forward micro-batch per rank"
_ROWS = {
    RANKS: "ranks / (sequence x tensor parallel)",
    "prompts per iteration": "data.train_batch_size",
    "sequences per iteration": "prompts x rollout.n",
    "sequences per mini-batch": "ppo_mini_batch_size x rollout.n",
    "mini-batches per epoch": "sequences / mini-batch",
    "mini-batch per rank": "sequences per mini-batch / data-parallel ranks",
    "micro-batch per rank": "one forward and backward pass",
    "micro-batches per mini-batch": "passes per rank and optimizer step",
    FORWARD: "one pass for log-probs, values or scores",
    "epochs": "ppo_epochs",
    "optimizer steps per iteration": "mini-batches x epochs",
}
"""Row names with their formulas."""


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
    return dict(zip((name for name in _ROWS if name != RANKS), values, strict=True))


def _size(micro: MicroBatch) -> int | str:
    return f"{micro.tokens} tokens" if micro.sequences is None else micro.sequences
