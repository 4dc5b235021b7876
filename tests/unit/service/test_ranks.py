"""A server whose models are trained by two ranks: rows, results, errors, and the death of a rank."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tinker_clients import Client, Failed, RunningServer, datum, read_output, read_samples, running_server
from support.tiny import tiny_folder
from transformers import AutoModelForCausalLM

from camshaft.config.serve import read_serve_config
from camshaft.controller.process_pool import ProcessPool
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import ConfigError
from camshaft.seat import Seat
from camshaft.service.shares import Shares

TOKENS = [[5 + row, *range(6, 7 + 3 * row)] for row in range(7)]
DATA = [datum(tokens) for tokens in TOKENS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, ranks=2, max_models=3, max_versions=2, save_every=2) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    yield server.client()
    server.finish()


def reference_log_probs(tokens: list[int]) -> list[float]:
    """Compute log-probs of all tokens but the first with transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(tie_embeddings=False), dtype=torch.float64).eval()
    with torch.no_grad():
        scores = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return scores[torch.arange(len(tokens) - 1), tokens[1:]].tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("forward_only", [True, False])
def test_results_are_in_the_order_of_the_datums(client: Client, num_rows: int, forward_only: bool) -> None:
    model = client.create_model()
    log_probs, loss = read_output(model.wait(model.train(1, DATA[:num_rows], forward_only=forward_only)))
    expected = [reference_log_probs(tokens) for tokens in TOKENS[:num_rows]]
    for row, values in zip(log_probs, expected, strict=True):
        assert row == pytest.approx(values, abs=1e-5)
    assert loss == pytest.approx(-sum(map(sum, expected)), rel=1e-5)


def test_updates_do_not_depend_on_the_split(client: Client) -> None:
    """A chunk with one datum leaves a rank without rows; the gradients of all chunks add up."""
    whole, chunks = client.create_model(0, rank=0), client.create_model(1, rank=0)
    whole.train(1, DATA)
    norm = whole.wait(whole.step(2, learning_rate=0.01))["metrics"]["grad_norm"]
    for number in range(7):
        chunks.train(number + 1, DATA[number : number + 1])
    assert chunks.wait(chunks.step(8, learning_rate=0.01))["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for row, other in zip(whole.log_probs(3, DATA), chunks.log_probs(9, DATA), strict=True):
        assert row == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("number", range(4))
def test_a_datum_on_any_rank_is_named(client: Client, number: int) -> None:
    data = [
        datum(
            tokens, logprobs=[-1e4 if row == number else -1.0] * (len(tokens) - 1), advantages=[1.0] * (len(tokens) - 1)
        )
        for row, tokens in enumerate(TOKENS[:4])
    ]
    model = client.create_model()
    with pytest.raises(Failed, match=f"datum {number}: the loss is not finite"):
        model.wait(model.train(1, data, "importance_sampling"))
    with pytest.raises(Failed, match=f"changed no weight and cleared the gradients.*datum {number}"):
        model.wait(model.step(2))
    model.train(3, DATA)
    assert model.wait(model.step(4))["metrics"]["grad_norm"] > 0


def test_samples_are_in_the_order_of_their_seeds_on_all_versions(client: Client) -> None:
    model, samplers, rows = client.create_model(), list[str](), list[Any]()
    for step in range(4):  # more versions than are kept in memory
        promise = model.command("save_weights_for_sampler", 3 * step + 1, sampling_session_seq_id=step)
        samplers.append(model.wait(promise)["sampling_session_id"])
        rows.append(client.sample(samplers[-1], 0, [5, 6], 5, seed=1))
        model.train(3 * step + 2, DATA)
        model.step(3 * step + 3, learning_rate=0.1)
    assert rows[0] != rows[3]
    for sampler, expected in zip(samplers, rows, strict=True):
        for seed in range(5):  # one row: a rank has none
            (tokens, log_probs, _), *others = client.sample(sampler, seed + 1, [5, 6], 1, seed=1 + seed)
            assert not others
            assert tokens == expected[seed][0]
            assert log_probs == pytest.approx(expected[seed][1], abs=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_models_and_samplers_survive_the_death_of_a_rank(server: RunningServer, client: Client, rank: int) -> None:
    killed, undisturbed = client.create_model(0), client.create_model(1)
    for model in (killed, undisturbed):
        for number in range(1, 7, 2):
            model.train(number, DATA)
            model.step(number + 1)
        model.wait(model.train(7, DATA))
    promise = killed.command("save_weights_for_sampler", 8, sampling_session_seq_id=0)
    sampler = killed.wait(promise)["sampling_session_id"]
    rows = client.sample(sampler, 0, [5, 6], 3, seed=1)
    kill_rank(server, rank)
    again = read_samples(client.wait(client.submit_sample(sampler, 1, [5, 6], 3, seed=1)))
    assert [row[0] for row in again] == [row[0] for row in rows]
    assert killed.wait(killed.step(9)) == undisturbed.wait(undisturbed.step(8))
    assert killed.log_probs(10, DATA) == undisturbed.log_probs(9, DATA)
    paths = [
        model.wait(model.command("save_weights", 11 - i, path="end"))["path"]
        for i, model in enumerate((killed, undisturbed))
    ]
    assert saved_weights(server, paths[0]) == saved_weights(server, paths[1])


def kill_rank(server: RunningServer, rank: int) -> None:
    pool = server.role._pool
    assert isinstance(pool, ProcessPool)
    pid = pool.processes[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def saved_weights(server: RunningServer, path: str) -> dict[str, list[bytes]]:
    """Return all tensors of the model and the optimizer that are saved under a path, as the bytes of their shards."""
    session, _, number = path.removeprefix("tinker://").partition("/")[0].partition(":train:")
    files = sorted(Path(server.config.folder).joinpath(session, number, "weights").glob("end.*/[mo]*/*.safetensors"))
    shards = [(f"{file.parent.name}/{name}", tensor) for file in files for name, tensor in load_file(file).items()]
    assert len(shards) > 10
    # Any rank may have saved a tensor that all of them have.
    return {key: sorted(part.numpy().tobytes() for name, part in shards if name == key) for key, _ in shards}


# -- the split -----------------------------------------------------------------------------------------


def rows_of(lengths: list[int]) -> DataProto:
    ids = Ragged.from_rows([torch.full((length,), row) for row, length in enumerate(lengths)])
    return DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})


def echo(part: DataProto) -> DataProto:
    return DataProto.from_dict({"log_probs": part.ragged("input_ids")}, {"loss": 1.0})


def test_ranks_get_the_same_number_of_tokens() -> None:
    lengths = [100, 3, 50, 3, 44, 90, 10]
    seats = [Seat(rank, 2, rank, 2) for rank in range(2)]
    shares = Shares.of(rows_of(lengths), seats)
    tokens = [len(part.ragged("input_ids").values) for part in shares.parts]
    assert tokens == [150, 150]
    log_probs, loss = shares.merge(list(map(echo, shares.parts)))
    assert log_probs.lengths.tolist() == lengths
    assert [set(row.tolist()) for row in log_probs.rows()] == [{row} for row in range(len(lengths))]
    assert loss == 2.0


def test_a_rank_without_rows_gets_one_of_which_no_token_counts() -> None:
    shares = Shares.of(rows_of([7, 5]), [Seat(rank, 3, rank, 3) for rank in range(3)])
    (empty,) = [part for part in shares.parts if not part.meta_info["numbers"]]
    assert empty.ragged("input_ids").lengths.tolist() == [5]
    assert not empty["loss_mask"].values.any()
    log_probs, _ = shares.merge(list(map(echo, shares.parts)))
    assert log_probs.lengths.tolist() == [7, 5]


def test_ranks_that_share_rows_give_one_result() -> None:
    seats = [Seat(rank, 4, rank // 2, 2, collects=rank % 2 == 1) for rank in range(4)]
    shares = Shares.of(rows_of([4, 4, 4]), seats)
    assert shares.parts[0] is shares.parts[1]
    assert shares.parts[2] is shares.parts[3]
    log_probs, loss = shares.merge(list(map(echo, shares.parts)))
    assert [row[0].item() for row in log_probs.rows()] == [0, 1, 2]
    assert loss == 2.0


# -- the config ---------------------------------------------------------------------------------------


def test_several_ranks_select_a_sharded_engine() -> None:
    model = f"model={tiny_folder()}"
    assert read_serve_config([model]).engine_name() == "reference"
    assert read_serve_config([model, "ranks=2"]).engine_name() == "fsdp"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine=reference", "ranks=2"], "engine=reference trains on one rank, not on 2. Set engine=fsdp"),
        (["ranks=0"], "ranks=0: Input should be greater than or equal to 1"),
        (["ranks=3", "engine_kwargs={ulysses_sequence_parallel_size: 2}"], "3 ranks are not divisible by the 2 ranks"),
        (["nnodes=2", "controller=local"], "nnodes=2 needs controller=ray"),
        (["ranks=2", "engine_kwargs={fsdp_siz: 2}"], "engine_kwargs: .*fsdp_siz"),
    ],
)
def test_ranks_that_do_not_fit_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_serve_config([f"model={tiny_folder()}", *arguments])
