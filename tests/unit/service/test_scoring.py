"""Log-probs of prompts and most likely tokens in answers to samples, and further base models that score.

`camshaft/contracts/tinker/scoring.py` has the rules for all servers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.tinker_clients import Client, Failed, RunningServer, running_server
from support.tiny import tiny_folder
from transformers import AutoModelForCausalLM

from camshaft.config.serve import ServeConfig
from camshaft.roles.served import ServedWorker
from camshaft.rollout import BaseRollout, PromptScores
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.service import scoring
from camshaft.wire import messages

PROMPT = [5, 6, 7, 8]


class Plain(TorchRollout):
    """A rollout that does not support `score`."""

    def score(self, *arguments: Any, **options: Any) -> PromptScores:
        return BaseRollout.score(self, *arguments, **options)


class Recorded(ServedWorker):
    """A worker that can be looked at."""

    last: ClassVar["Recorded"]

    def __init__(self, config: ServeConfig):
        super().__init__(config)
        Recorded.last = self


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), worker=ServedWorker) as server:
        yield server


@pytest.fixture
def client(shared: RunningServer) -> Iterator[Client]:
    yield shared.client()
    shared.finish()


def request(client: Client, sampler: str, number: int = 1, /, prompt: list[int] = PROMPT, **fields: Any) -> Any:
    """Return the answer to a request for samples with these fields."""
    body = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": {"max_tokens": 1}, **fields}
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
    return messages.SampleResponse.FromString(client.wait(client.post("asample", **body)))


def reference_log_probs(folder: str, tokens: list[int]) -> list[float]:
    """Compute the log-probs of the tokens of a prompt but the first, with transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def table(data: list[int], *shape: int, **fields: Any) -> dict[str, Any]:
    return {"target_prompt_logprobs": {"data": data, "dtype": "int64", "shape": list(shape), **fields}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_alt_tokens_k": 4}, "prompt_alt_tokens_k=4 is not supported by this server; request topk_prompt_logp"),
        (
            {"prompt_logprobs_last_n": 2},
            "prompt_logprobs_last_n=2 selects log-probs of the prompt; set include_prompt_logprobs",
        ),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n=4 is not from 1 to 3"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n=0 is not from 1 to 3"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs=-1 is not from 0 to"),
        ({"topk_sample_logprobs": 10**6}, "topk_sample_logprobs=1000000 is not from 0 to"),
        (
            {"topk_prompt_logprobs": 3},
            "topk_prompt_logprobs=3 for 4 tokens are 12 log-probs; this server returns up to 10",
        ),
        (table([5] * 4, 4, 1), r"is int64 of shape \[4, 1\]; give token ids \(int64\) of shape \[3, K\]"),
        (table([5] * 3, 3), r"is int64 of shape \[3\]; give token ids"),
        (table([5] * 12, 3, 4), r"has the shape \[3, 4\]; this server accepts up to 10 cells"),
        (table([5] * 3, 3, 2), r"has 3 ids, but its shape is \[3, 2\]"),
        (table([5, 10**6, 5], 3, 1), "contains the token id 1000000, but those of the model are 0"),
        (table([5, -2, 5], 3, 1), "contains the token id -2"),
        (table([-1] * 3, 3, 1), "asks for nothing; give at least one token id"),
        (
            table([5], 3, 1, sparse_crow_indices=[0, 1, 1, 1], sparse_col_indices=[1]),
            "has 1 ids, 4 row pointers and 1 column indices, which are no sparse table",
        ),
        (
            table([5], 3, 1, sparse_crow_indices=[0, 2, 1, 1], sparse_col_indices=[0]),
            "which are no sparse table of shape",
        ),
    ],
)
def test_a_wrong_request_for_log_probs_is_a_failed_result(
    client: Client, fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_CELLS", 10)
    sampler = client.sampler(0, base_model="tiny")
    with pytest.raises(Failed, match=message):
        request(client, sampler, **fields)
    assert len(request(client, sampler, 2, prompt_logprobs=True).prompt_logprobs) == 4 * len(PROMPT)


def test_tokens_that_top_p_excludes_are_empty_cells(client: Client) -> None:
    params = {"max_tokens": 3, "stop": [], "seed": 1, "top_k": 2}
    response = request(client, client.sampler(0, base_model="tiny"), topk_sample_logprobs=4, sampling_params=params)
    (sequence,) = response.sequences
    log_probs = np.frombuffer(sequence.topk_sampled_logprobs.logprobs, "<f4").reshape(3, 4)
    ids = np.frombuffer(sequence.topk_sampled_logprobs.token_ids, "<i4").reshape(3, 4)
    assert np.exp(log_probs[:, :2]).sum(1) == pytest.approx(1, abs=1e-6)
    assert (log_probs[:, 2:] == scoring.EMPTY).all()
    assert (ids[:, 2:] == 0).all()
    sampled = zip(np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4"), strict=True)
    for row, (token, log_prob) in enumerate(sampled):
        assert log_probs[row][ids[row] == token] == pytest.approx(log_prob, abs=1e-5)


def test_a_request_for_samples_only_has_no_log_probs_of_the_prompt(client: Client) -> None:
    response = request(client, client.sampler(0, base_model="tiny"))
    present = {field.name for field, _ in response.ListFields()} | {
        f.name for f, _ in response.sequences[0].ListFields()
    }
    assert present <= {"sequences", "stop_reason", "tokens", "logprobs"}


def test_a_rollout_that_does_not_score_is_named(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=ServedWorker, rollout=f"{__name__}:Plain") as server:
        client = server.client()
        sampler = client.sampler(0, base_model="tiny")
        with pytest.raises(Failed, match="Plain does not return the log-probs of given tokens; use a rollout whose"):
            request(client, sampler, prompt_logprobs=True)
        assert len(request(client, sampler, 2).sequences) == 1
        server.finish()


def test_further_base_models_score_within_max_samplers(tmp_path: Path) -> None:
    folders = {"tiny": tiny_folder(tie_embeddings=False), "teacher": tiny_folder("llama", seed=5)}
    served = ",".join(f"{name}={folder}" for name, folder in folders.items())
    with running_server(tmp_path, worker=Recorded, model=f"[{served}]", max_samplers=1) as server:
        client = server.client()
        samplers = {name: client.sampler(number, base_model=name) for number, name in enumerate(folders)}
        model = client.create_model()
        for number in range(2):
            for name, folder in folders.items():
                response = request(client, samplers[name], number, prompt_logprobs=True)
                actual = np.frombuffer(response.prompt_logprobs, "<f4")[1:]
                assert actual == pytest.approx(reference_log_probs(str(folder), PROMPT), abs=1e-5)
                assert list(Recorded.last.rollouts) == [str(folder)]
        assert list(Recorded.last.models) == [model.identifier]
        server.finish()
