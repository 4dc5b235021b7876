"""The server rollout selects a weight transport by the devices of trainer and server."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulated_cuda import DEVICE, EMULATOR, EmulatedTensor, Emulator, emulated_cuda
from support.fake_servers import fake_server
from support.gated_rollouts import WorkerReplies
from support.tiny import tiny_folder

from camshaft.config import RolloutEngineConfig
from camshaft.config.engine import EngineModel
from camshaft.device import device_identity
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.models.loader import stored_weights
from camshaft.rollout import build_rollout
from camshaft.rollout.server import client
from camshaft.rollout.server.client import ServerClient
from camshaft.rollout.weights import transport

pytestmark = pytest.mark.timeout(120)

STATE = {"identity": "a", "version": None, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
         "max_model_len": 1024, "dtype": "float32", "device": ""}  # fmt: skip
LOCAL, REMOTE = "http://127.0.0.1:8000", "http://10.0.0.7:8000"
FIRST, SECOND = "cuda GPU-0", "cuda GPU-1"


def client_of(
    monkeypatch: pytest.MonkeyPatch, device: str, workers: list[str], url: str = LOCAL, transfer: Any = None
) -> Any:
    """Return a client of a trainer on `device`, whose GPU is `FIRST`, and of a server with `workers`."""
    monkeypatch.setattr(client, "device_identity", lambda device: "" if device.type == "cpu" else FIRST)
    monkeypatch.setattr(transport, "IPC_DEVICES", ("cuda", "meta"))
    monkeypatch.setattr(client, "_local_address_towards", lambda url: "127.0.0.1")
    config: Any = RolloutEngineConfig(model_path="m", device=device, update_weights_bucket_megabytes=1)
    connected: Any = ServerClient(SimpleNamespace(url=url), config, transfer)  # pyright: ignore[reportArgumentType]
    connected._devices, connected._identity = workers, ["a"] * len(workers)
    return connected


@pytest.mark.parametrize(
    ("device", "workers", "url", "expected", "warning"),
    [
        ("cpu", [""], LOCAL, "shared_memory", ""),
        ("cpu", [""], REMOTE, "broadcast", ""),
        ("cuda:0", [FIRST], LOCAL, "device_memory", ""),
        ("cuda:0", [FIRST], REMOTE, "broadcast", ""),
        ("cuda:0", [SECOND], LOCAL, "shared_memory", f"the server runs on {SECOND} and the trainer on {FIRST}"),
        ("cuda:0", [FIRST, SECOND], LOCAL, "shared_memory", f"the server runs on {SECOND} and the trainer on"),
        ("cuda:0", [""], LOCAL, "shared_memory", f"the server runs on a CPU and the trainer on {FIRST}"),
    ],
)
def test_transport_depends_on_the_devices(
    device: str,
    workers: list[str],
    url: str,
    expected: str,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    selected = client_of(monkeypatch, device, workers, url)._select_transfer()
    assert selected == expected
    assert [warning in record.getMessage() for record in caplog.records] == [True] * bool(warning)


@pytest.mark.parametrize(
    ("device", "workers", "transfer", "problem"),
    [
        ("cpu", [""], "device_memory", "the trainer runs on device=cpu, which does not share its memory"),
        ("cuda:0", [SECOND], "device_memory", f"the server runs on {SECOND} and the trainer on {FIRST}"),
        ("cuda:0", [FIRST], "device_broadcast", f"the server runs on {FIRST} like the trainer, and NCCL requires"),
        ("cuda:0", [""], "device_broadcast", f"the trainer runs on {FIRST} and the server on a CPU"),
        ("cpu", [FIRST], "device_broadcast", f"the trainer runs on a CPU and the server on {FIRST}"),
    ],
)
def test_an_impossible_transport_is_rejected(
    device: str, workers: list[str], transfer: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RolloutError, match=f"weight_transfer={transfer} is not possible, because {problem}"):
        client_of(monkeypatch, device, workers, REMOTE, transfer)._open_sender(transfer)


@pytest.mark.parametrize(("transfer", "device"), [("broadcast", "cpu"), ("device_broadcast", "meta")])
def test_a_device_broadcast_has_buffers_on_the_device(
    transfer: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = client_of(monkeypatch, "meta", [SECOND, "cuda GPU-2"], REMOTE, transfer)._open_sender(transfer)
    assert {buffer.device.type for buffer in sender.buffers} == {device}
    assert (sender.handle()["device"], sender.handle()["world"]) == (device, 3)


# -- device memory, between a trainer and a worker on an emulated device ---------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Emulate a device whose memory is shared by handles, which the registry maps to tensors."""
    registry: dict[bytes, EmulatedTensor] = {}

    def share(tensor: EmulatedTensor) -> tuple[Any, tuple[Any, ...]]:
        handle = f"handle {len(registry)}".encode()
        registry[handle] = tensor
        numbers = (torch.Tensor, tensor.shape, (1,), 0, torch.UntypedStorage, torch.uint8, 5, handle, tensor.nbytes, 0)
        return None, (*numbers, False, b"counter", 0, b"event", True)

    def open_shared(*arguments: Any) -> torch.Tensor:
        assert arguments[6] == 0, "the index of the device in the process of the worker"
        return EmulatedTensor(registry[arguments[7]].host)

    monkeypatch.setattr(transport, "IPC_DEVICES", (DEVICE,))
    monkeypatch.setattr(transport, "reduce_tensor", share)
    monkeypatch.setattr(transport, "rebuild_cuda_tensor", open_shared)
    with emulated_cuda() as device:
        yield device


class DeviceWorker(WorkerReplies):
    """A worker on the emulated device. Each thread of the server enters the mode of the device."""

    def begin(self, handle: dict[str, Any], **_: Any) -> None:
        self.device = torch.device(DEVICE, 0)
        with EMULATOR:
            super().begin(handle)

    def bucket(self, pieces: list[dict[str, Any]], buffer: int, num_bytes: int) -> None:
        with EMULATOR:
            super().bucket(pieces, buffer, num_bytes)


def device_rollout(url: str, **options: Any) -> Any:
    kwargs = {"vllm_server_base_url": url, **options}
    config = RolloutEngineConfig(
        model_path=str(tiny_folder(hidden=128, intermediate=2304)),
        device=DEVICE,
        update_weights_bucket_megabytes=1,
        engine_kwargs=kwargs,
    )
    return build_rollout("server", config)


def device_weights() -> list[tuple[str, torch.Tensor]]:
    folder = str(tiny_folder(hidden=128, intermediate=2304))
    return [(name, weight.to(DEVICE)) for name, weight in stored_weights(EngineModel(path=folder))]


def test_weights_stay_on_a_device_that_trainer_and_server_share(device: Emulator) -> None:
    weights = device_weights()
    worker = DeviceWorker(STATE | {"device": device_identity(torch.device(DEVICE, 0))})
    with fake_server(worker) as fake:
        rollout = device_rollout(fake.url)
        device.reset()
        rollout.load_weights(weights)
        copies = [place for place in device.waits if "copy" in place]
    assert [handle["means"] for handle in worker.handles] == ["device_memory"]
    assert copies == []
    for name, weight in weights:
        assert worker.weights[name].device.type == DEVICE
        assert torch.equal(worker.weights[name].cpu(), weight.cpu())
    assert rollout._client._transfer is None


def test_a_worker_that_cannot_open_device_memory_gets_host_memory(
    device: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    weights = device_weights()
    worker = WorkerReplies(STATE | {"device": device_identity(torch.device(DEVICE, 0))})
    worker.refuses = "device_memory"
    with fake_server(worker) as fake:
        rollout = device_rollout(fake.url)
        for _ in range(2):
            rollout.load_weights(weights)
    assert [handle["means"] for handle in worker.handles] == ["device_memory", "shared_memory", "shared_memory"]
    (record,) = caplog.records
    assert "cannot open the shared device memory" in record.getMessage()
    assert "through host memory" in record.getMessage()
    assert {name: digest(weight) for name, weight in worker.weights.items()} == {
        name: digest(weight.cpu()) for name, weight in weights
    }


def test_device_memory_that_the_config_demands_has_no_fallback(device: Emulator) -> None:
    worker = WorkerReplies(STATE | {"device": device_identity(torch.device(DEVICE, 0))})
    worker.refuses = "device_memory"
    with fake_server(worker) as fake:
        rollout = device_rollout(fake.url, weight_transfer="device_memory")
        with pytest.raises(RolloutError, match="cannot open the shared device memory"):
            rollout.load_weights(device_weights())


def test_memory_that_cannot_be_opened_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(transport, "rebuild_cuda_tensor", fails)
    types = (torch.UntypedStorage, torch.uint8)
    arguments = (torch.Tensor, torch.Size([8]), (1,), 0, *types, 1, b"h", 8, 0, False, b"r", 0, b"e", True)
    handle = transport.encode_device_handle(arguments)
    with pytest.raises(RolloutError, match=r"shared device memory of the trainer on cuda:1 \(CUDA error: invalid"):
        transport.open_receiver(handle, device=torch.device("cuda", 1))
