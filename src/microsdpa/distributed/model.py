"""Estimates of the time on the wire and of computing: they choose among the methods."""

from __future__ import annotations

from dataclasses import dataclass

from microsdpa.distributed.visible import UNBOUNDED, Visible

FIRST_PART = 8
"""The first group has 1 / FIRST_PART of the heads, if that is one."""
HIDDEN = 4.0
"""A short call whose computing takes this many times as long as its transfers has one group of heads."""
SHORT = 262144
"""Rows of queries of a rank, of all heads, below which one launch computes both of its chunks."""
PARTS_OF_HEADS = 4
"""Groups that the heads of a rank are exchanged in, at most."""
EXCHANGES = 4
"""Exchanges of a group of heads: of queries, keys, values and outputs."""


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU and of what links it to others, measured on two H200 but for the network's.

    Attributes:
        flops: multiplications and additions per second of attention in 16 bits at D = 128.
        link: bytes per second that a GPU sends to, and gets from, others of its host by the copy engines.
        nccl: the same by NCCL without NVLink multicast.
        network: bytes per second of each GPU's own network adapter.
        memory: bytes per second of the GPU's memory.
        start: seconds from the call to the first byte on the wire, and of every further launch that nothing hides.
        exchange: seconds that the host takes to pack, send and unpack one tensor of the method "heads".
        per_host: GPUs of a host.
    """

    flops: float = 650e12
    link: float = 370e9
    nccl: float = 228e9
    network: float = 45e9
    memory: float = 3.6e12
    start: float = 12e-6
    exchange: float = 300e-6
    per_host: int = 8


@dataclass(frozen=True)
class Problem:
    """Sizes of a call over all ranks; `itemsize` is in bytes."""

    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    itemsize: int
    visible: Visible

    @property
    def world(self) -> int:
        """Ranks."""
        return self.visible.keys.world

    def pairs(self, rank: int) -> float:
        """Pairs of a query and a key that it sees, of one head of a rank."""
        visible, found = self.visible, 0.0
        left, right = visible.ends
        for chunk in visible.queries.shards[rank]:
            seen = []
            for place in (chunk.start + visible.shift, chunk.stop - 1 + visible.shift):
                first = 0 if left == UNBOUNDED else max(place - left, 0)
                stop = visible.keys.total if right == UNBOUNDED else min(place + right + 1, visible.keys.total)
                seen.append(max(stop - first, 0))
            found += chunk.length * (seen[0] + seen[1]) / 2
        return found

    @property
    def flops(self) -> float:
        """Multiplications and additions of the rank that has most."""
        return 4.0 * self.batch * self.heads * self.head_dim * max(map(self.pairs, range(self.world)))

    @property
    def is_short(self) -> bool:
        """Whether launches are few waves of the SMs."""
        return self.batch * self.heads * self.visible.queries.longest < SHORT

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.batch * self.heads_kv * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Estimate:
    """What a method takes: bytes that a rank gets, seconds on the wire, of computing, and of the whole call."""

    method: str
    received: float
    wire: float
    compute: float
    total: float

    def __str__(self) -> str:
        """A line for a person."""
        return (
            f"{self.method:11} {self.received / 1e6:9.1f} MB received, wire {self.wire * 1e3:8.3f} ms, "
            f"compute {self.compute * 1e3:8.3f} ms, in all {self.total * 1e3:8.3f} ms"
        )


def head_groups(problem: Problem, machine: Machine | None = None) -> list[tuple[int, int]]:
    """Groups of key heads that travel one after another: the first of each and one past the last.

    While a group is computed the next one travels. The first group is small, as nothing hides its way. Long calls have
    equal groups, whose keys and values stay in the L2 cache. Short ones have two at most, as every launch leaves SMs
    idle at its end, and one if the wire takes little of their time.
    """
    machine, count = machine or Machine(), problem.heads_kv
    first = max(1, count // FIRST_PART)
    if not problem.is_short:
        return [(low, min(low + first, count)) for low in range(0, count, first)]
    received = problem.token_bytes * problem.visible.keys.total * (problem.world - 1) / problem.world
    if count < 2 or problem.flops / machine.flops >= HIDDEN * received / machine.link:
        return [(0, count)]
    return [(0, first), (first, count)]


def all_gather(problem: Problem, machine: Machine, symmetric: bool) -> Estimate:
    """Keys and values in groups of heads, of which each is computed while the next one travels."""
    visible, world = problem.visible, problem.world
    if symmetric:
        tokens = max(
            sum(chunk.length for source in range(world) if source != rank for chunk in visible.sends[source][rank])
            for rank in range(world)
        )
    else:
        tokens = visible.keys.total - min(visible.keys.lengths)
    received, compute = float(tokens * problem.token_bytes), problem.flops / machine.flops
    if world > machine.per_host:
        # What comes from other hosts enters by all adapters of the host side by side, and is handed on by the links.
        outside = received * (world - machine.per_host) / max(world - 1, 1)
        wire = max(outside / machine.per_host / machine.network, received / machine.nccl)
    else:
        wire = received / (machine.link if symmetric else machine.nccl)
    if not symmetric:
        wire += 2 * received / machine.memory
    come, done = machine.start, 0.0
    for low, high in head_groups(problem, machine):
        part = (high - low) / problem.heads_kv
        come += wire * part
        done = max(come, done) + compute * part
    return Estimate("all_gather", received, wire, compute, done)


def ring(problem: Problem, machine: Machine) -> Estimate:
    """Shards that go round: the slowest link counts, and every step but the first is merged in memory."""
    world, compute = problem.world, problem.flops / machine.flops
    received = float(problem.visible.keys.total - min(problem.visible.keys.lengths)) * problem.token_bytes
    wire = received / (machine.nccl if world <= machine.per_host else machine.network)
    rows = problem.batch * problem.heads * problem.visible.queries.longest * problem.head_dim
    merge = 24.0 * rows / machine.memory
    steps = max(world - 1, 1)
    total = machine.start + steps * max(wire / steps, compute / world + merge) + compute / world + merge
    return Estimate("ring", received, wire, compute, total)


def parts_of_heads(count: int, is_short: bool) -> int:
    """Groups that a rank's `count` key heads are exchanged in; one where the host would be what takes the time."""
    return 1 if is_short else max(min(count, PARTS_OF_HEADS), 1)


def heads(problem: Problem, machine: Machine) -> Estimate:
    """Queries, keys and values to the ranks of their heads, and outputs back."""
    world, compute = problem.world, problem.flops / machine.flops
    row = problem.batch * problem.head_dim * problem.itemsize * (world - 1) / world
    of_queries = 2 * problem.heads * problem.visible.queries.longest * row
    received = of_queries + 2 * problem.heads_kv * problem.visible.keys.longest * row
    if world > machine.per_host:
        wire = received * (world - machine.per_host) / (world - 1) / machine.network
    else:
        wire = received / machine.nccl
    # All ranks compute the same whatever the order is: whole heads.
    compute = compute if problem.visible.queries.order == "balanced" else _even_compute(problem, machine)
    wire += 4 * received / machine.memory
    parts = parts_of_heads(problem.heads_kv // world, problem.is_short)
    back = wire * of_queries / 2 / received if received else 0.0  # a group of one receives nothing
    there = wire - back
    total = 2 * machine.start + there / parts + max(compute, wire) + back / parts
    total = max(total, parts * EXCHANGES * machine.exchange)
    return Estimate("heads", received, wire, compute, total)


def _even_compute(problem: Problem, machine: Machine) -> float:
    pairs = sum(map(problem.pairs, range(problem.world))) / problem.world
    return 4.0 * problem.batch * problem.heads * problem.head_dim * pairs / machine.flops


def estimates(problem: Problem, symmetric: bool, machine: Machine | None = None) -> list[Estimate]:
    """Those of the methods that compute a problem, the shortest first."""
    machine = machine or Machine()
    found = [all_gather(problem, machine, symmetric), ring(problem, machine)]
    if problem.heads_kv % problem.world == 0:
        found.append(heads(problem, machine))
    return sorted(found, key=lambda estimate: estimate.total)
