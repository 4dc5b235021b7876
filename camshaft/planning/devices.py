"""Memory of devices, to plan a run on a machine that does not have them.

parse_device("h100")            # 79 GiB
device_memory("cuda")           # that of the first device of this machine
"""

from camshaft.errors import ConfigError

GIB = 2**30
DEVICES = {"a100-40": 39, "a100-80": 79, "h100": 79, "h100-80": 79, "h200": 139, "l40s": 44, "rtx-4090": 23}
"""Memory in GiB that torch reports for a device, rounded down. It is below the nominal one."""


def parse_device(name: str) -> int:
    """Return the memory of a device in bytes."""
    if name not in DEVICES:
        raise ConfigError(
            f"--device {name} is unknown; set one of {', '.join(DEVICES)}, or --memory to the memory of the device"
        )
    return DEVICES[name] * GIB


def device_memory(kind: str) -> int:
    """Return the memory of the first device of this machine in bytes."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        raise ConfigError(
            f"this machine has no {kind} device whose memory could be read; set --device to one of "
            f"{', '.join(DEVICES)}, or --memory to the memory of each device"
        )
    return torch.get_device_module(found).mem_get_info(0)[1]
