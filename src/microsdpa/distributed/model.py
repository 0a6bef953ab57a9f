"""Estimates of the time on the wire and of computing, and the choice that follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from microsdpa.distributed.agreement import Method, Transport
from microsdpa.distributed.visible import Visible

if TYPE_CHECKING:
    from microsdpa.distributed.api import Signature

FLOPS = 650e12
"""Multiplications and additions per second of attention on an H200, 16 bits."""
LINK = 350e9
"""Bytes per second that an H200 receives from others of its host."""


def ratio(of: Signature, visible: Visible) -> float:
    """Time of computing a key head over the time of its transfer."""
    world = visible.keys.world
    share = 0.5 if visible.causal is not None else 1.0
    products = 4.0 * visible.queries.total * visible.keys.total * share * of.head_dim * of.heads / of.heads_kv / world
    data = 2.0 * visible.keys.total * of.head_dim * of.dtype.itemsize * (world - 1) / world
    return (products / FLOPS) / max(data / LINK, 1e-9)


def choose(of: Signature, visible: Visible, group: dist.ProcessGroup) -> tuple[Method, Transport]:
    """The method and the transport of a call."""
    method: Method = "all_gather" if of.method == "auto" else of.method  # type: ignore[assignment]
    transport: Transport = "symmetric" if of.device == "cuda" else "collective"
    if of.transport != "auto":
        transport = of.transport  # type: ignore[assignment]
    return method, transport
