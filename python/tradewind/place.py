"""Where this process runs and what it was told: ranks, devices, channels, hyperparameters.

Everything is read from the environment, once, without importing torch. SageMaker's `SM_*` names are
read on every kind of place, so that one script serves them all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CHANNEL_PREFIX = "SM_CHANNEL_"


@dataclass(frozen=True)
class Place:
    """Where this process runs. `master_addr` and `master_port` are None off torchrun; `local_*`
    count the processes of one machine; `node_rank` is below `num_nodes`, `rank` below
    `world_size`. `visible_devices` is CUDA_VISIBLE_DEVICES as it was found."""

    kind: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    channels: dict[str, Path] = field(default_factory=dict)
    hyperparameters: dict[str, object] = field(default_factory=dict)
    model_dir: Path | None = None
    checkpoint_dir: Path | None = None
    run_dir: Path | None = None
    visible_devices: str | None = None

    @property
    def is_main(self) -> bool:
        """True on rank 0, the rank that writes the run directory."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """This rank's device: "cuda:LOCAL_RANK" where CUDA answers, else "cpu". Imports torch.

        Raises RuntimeError where this machine shows fewer GPUs than it has ranks.
        """
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        num_gpus = torch.cuda.device_count()
        if self.local_rank < num_gpus:
            return torch.device("cuda", self.local_rank)
        if num_gpus == 1 and self.visible_devices and "," not in self.visible_devices:
            return torch.device("cuda", 0)  # the launcher shows each rank a GPU of its own
        raise RuntimeError(
            f"LOCAL_RANK: expected a rank below the {num_gpus} GPU(s) this process sees, got "
            f"{self.local_rank}; start {num_gpus} process(es) per machine, or set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )


def place(environ: Mapping[str, str] | None = None) -> Place:
    """Read the place from `environ` (default: the process's environment).

    Raises ValueError that names the variable for a malformed environment.
    """
    env = os.environ if environ is None else environ
    told: dict[str, Any] = {
        "channels": _channels(env),
        "hyperparameters": _hyperparameters(env),
        "model_dir": _path(env, "SM_MODEL_DIR"),
        "checkpoint_dir": _path(env, "TRADEWIND_CHECKPOINT_DIR"),
        "run_dir": _path(env, "TRADEWIND_RUN"),
        "visible_devices": env.get("CUDA_VISIBLE_DEVICES"),
    }
    if _is_torchrun(env):
        return Place(kind="torchrun", **_ranks(env), **told)
    return Place(kind="laptop", **told)


def _is_torchrun(env: Mapping[str, str]) -> bool:
    if env.get("TORCHELASTIC_RUN_ID"):
        return True
    has_rank, has_world = bool(env.get("RANK")), bool(env.get("WORLD_SIZE"))
    if not has_rank and not has_world:
        return False
    world_size = _integer(env, "WORLD_SIZE", minimum=1) if has_world else None
    if not has_rank:
        if world_size == 1:
            return False
        raise _missing("RANK", "WORLD_SIZE", env)
    if world_size is None:
        raise _missing("WORLD_SIZE", "RANK", env)
    if env.get("MASTER_ADDR"):
        return True
    if world_size > 1:
        raise _missing("MASTER_ADDR", "WORLD_SIZE", env)
    _below(env, "RANK", _integer(env, "RANK", minimum=0), "WORLD_SIZE", world_size)
    return False


def _ranks(env: Mapping[str, str]) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE"):
        if not env.get(name):
            raise _missing(name, "TORCHELASTIC_RUN_ID", env)
    world_size = _integer(env, "WORLD_SIZE", minimum=1)
    rank = _integer(env, "RANK", minimum=0)
    _below(env, "RANK", rank, "WORLD_SIZE", world_size)
    # Without LOCAL_* one machine is assumed: wrong on several, but loudly (see Place.device),
    # where assuming one process per machine would put every rank on GPU 0 in silence.
    local_world = _integer(env, "LOCAL_WORLD_SIZE", minimum=1, default=world_size)
    if local_world > world_size:
        raise _malformed(env, "LOCAL_WORLD_SIZE", f"at most WORLD_SIZE, which is {world_size}")
    local_rank = _integer(env, "LOCAL_RANK", minimum=0, default=rank % local_world)
    _below(env, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
    num_nodes = _integer(env, "GROUP_WORLD_SIZE", minimum=1, default=-(-world_size // local_world))
    node_rank = _integer(env, "GROUP_RANK", minimum=0, default=rank // local_world)
    _below(env, "GROUP_RANK", node_rank, "GROUP_WORLD_SIZE", num_nodes)
    return {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "local_world_size": local_world,
        "node_rank": node_rank,
        "num_nodes": num_nodes,
        "master_addr": env.get("MASTER_ADDR") or None,
        "master_port": _port(env),
    }


def _port(env: Mapping[str, str]) -> int | None:
    if not env.get("MASTER_PORT"):
        return None
    port = _integer(env, "MASTER_PORT", minimum=1)
    if port > 65535:
        raise _malformed(env, "MASTER_PORT", "a port from 1 to 65535")
    return port


def _channels(env: Mapping[str, str]) -> dict[str, Path]:
    return {
        name[len(_CHANNEL_PREFIX) :].lower(): Path(value)
        for name, value in sorted(env.items())
        if name.startswith(_CHANNEL_PREFIX) and name != _CHANNEL_PREFIX and value
    }


def _hyperparameters(env: Mapping[str, str]) -> dict[str, object]:
    text = env.get("SM_HPS", "")
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        raise _malformed(env, "SM_HPS", 'a JSON object such as {"lr": 0.001}') from None
    if not isinstance(value, dict):
        raise _malformed(env, "SM_HPS", 'a JSON object such as {"lr": 0.001}')
    return value


def _path(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name)
    return Path(value) if value else None


def _integer(env: Mapping[str, str], name: str, *, minimum: int, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise _malformed(env, name, f"an integer of at least {minimum}") from None
    if value < minimum:
        raise _malformed(env, name, f"an integer of at least {minimum}")
    return value


def _below(env: Mapping[str, str], name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise _malformed(
            env, name, f"a rank below {limit_name}, which is {limit} (ranks count from 0)"
        )


def _malformed(env: Mapping[str, str], name: str, expected: str) -> ValueError:
    return ValueError(
        f"environment variable {name}: expected {expected}, got {env.get(name, '(unset)')!r}; "
        f"correct {name}, or start the processes with torchrun, which sets it"
    )


def _missing(name: str, beside: str, env: Mapping[str, str]) -> ValueError:
    return ValueError(
        f"environment variable {name}: expected it beside {beside}={env.get(beside)!r}, but it is "
        f"not set; start the processes with torchrun, or unset {beside} to run alone"
    )


class _CallableModule(ModuleType):
    """`tw.place` is a function to users. Whoever imports this module first makes that name the
    module instead, which therefore answers a call as the function does."""

    def __call__(self, environ: Mapping[str, str] | None = None) -> Place:
        return place(environ)


sys.modules[__name__].__class__ = _CallableModule
