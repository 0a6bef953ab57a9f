"""What all ranks of a group have to know of one another before data travels: exchanged once for a new call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from microsdpa.errors import InvalidArgument

MAX_KNOWN = 256

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()


def resolve(group: object) -> dist.ProcessGroup:
    """The process group of `group`: None for the default one, a group, or a DeviceMesh of one dimension.

    Raises:
        InvalidArgument: it is none of these, or this rank does not belong to it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument(
            "group",
            expected="an initialized torch.distributed",
            got="none",
            hint="call torch.distributed.init_process_group() first, for example under torchrun",
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgument(
                "group",
                expected="a DeviceMesh of one dimension",
                got=f"one of {group.ndim}, {group.mesh_dim_names or tuple(group.shape)}",
                hint='pass mesh["name"], the dimension that the sequence is spread over',
            )
        return group.get_group()
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise InvalidArgument(
            "group",
            expected="a process group that this rank belongs to, a DeviceMesh, or None",
            got=type(group).__name__,
            hint="torch.distributed.new_group() gives one to its members only",
        )
    return found


def known(group: dist.ProcessGroup) -> dict[Any, Any]:
    """What is remembered of a group, by the signature of a call."""
    found = _known.setdefault(group, {})
    if len(found) > MAX_KNOWN:
        found.clear()
    return found


def forget(group: object = None) -> None:
    """Exchange shapes anew at the next call of every kind: needed where shapes of some ranks alone have changed."""
    _known.pop(resolve(group), None)


def exchange(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """The picklable object of every rank, by rank. Every rank of the group has to call it."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def device_name(tensor: torch.Tensor) -> str:
    """What ranks compare of a device: its type, as each has a number of its own."""
    return tensor.device.type
