"""What all ranks of a group have to know of one another before data travels: exchanged once for a new call."""

from __future__ import annotations

import pickle
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from microsdpa.errors import InvalidArgument, MicrosdpaError

MAX_KNOWN = 256


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


class Peers:
    """What is remembered of a group: what its ranks have agreed upon, by the signature of a call.

    Ranks tell each other through the group's store, which waits as long as the group's timeout says and leaves the
    GPUs alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.agreements: dict[Any, Any] = {}
        self.rank, self.world = group.rank(), group.size()
        self.store = PrefixStore("microsdpa", _get_process_group_store(group))
        self.turn = 0
        self.timeout = timeout_of(group)

    def exchange(self, mine: Any) -> list[Any]:
        """The picklable object of every rank, by rank. Every rank of the group has to call it.

        Raises:
            MicrosdpaError: a rank did not come before the group's timeout.
        """
        self.turn += 1
        self.store.set(f"{self.turn}/{self.rank}", pickle.dumps(mine))  # type: ignore[arg-type]
        found = []
        for rank in range(self.world):
            try:
                self.store.wait([f"{self.turn}/{rank}"], self.timeout)
                found.append(pickle.loads(self.store.get(f"{self.turn}/{rank}")))
            except RuntimeError as error:
                raise MicrosdpaError(
                    f"rank {rank} of the group has not come to this call of microsdpa.distributed, which rank "
                    f"{self.rank} waits in; all ranks of a group make the same calls in the same order"
                ) from error
        if self.turn > 1:  # whoever is here has read what was said a turn ago
            self.store.delete_key(f"{self.turn - 1}/{self.rank}")
        return found

    def remember(self, signature: Any, agreement: Any) -> None:
        """Keep what was agreed upon."""
        if len(self.agreements) >= MAX_KNOWN:
            self.agreements.clear()
        self.agreements[signature] = agreement


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long ranks of a group wait for each other."""
    device = next(iter(group._device_types))
    options = getattr(group._get_backend(device), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else dist.default_pg_timeout


_peers: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()


def peers(group: dist.ProcessGroup) -> Peers:
    """What is remembered of a group."""
    found = _peers.get(group)
    if found is None:
        found = _peers[group] = Peers(group)
    return found
