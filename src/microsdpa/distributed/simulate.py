"""Estimates of all methods for 2 to 1,024 GPUs.

python -m microsdpa.distributed.simulate --seqlen 131072 --heads 32 --heads-kv 8
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from microsdpa.distributed.layout import even
from microsdpa.distributed.model import Machine, Problem, estimates
from microsdpa.distributed.visible import UNBOUNDED, Visible


def table(seqlen: int, query_heads: int, heads_kv: int, head_dim: int, machine: Machine) -> list[str]:
    """Lines of the simulation: a causal call in balanced order, in BF16, for 2 to 1,024 GPUs."""
    lines = ["GPUs  one GPU / GPUs ms  estimates ms"]
    for world in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        layout = even(seqlen, world, "balanced")
        visible = Visible(layout, layout, "lower_right", (UNBOUNDED, UNBOUNDED), False)
        problem = Problem(1, query_heads, heads_kv, head_dim, 2, visible)
        found = estimates(problem, world <= machine.per_host, machine)
        ideal = problem.flops / machine.flops * 1e3
        said = ", ".join(f"{one.method} {one.total * 1e3:.3f}" for one in found)
        lines.append(f"{world:4}  {ideal:17.3f}  {said}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the simulation."""
    parser = argparse.ArgumentParser(prog="python -m microsdpa.distributed.simulate", description=main.__doc__)
    parser.add_argument("--seqlen", type=int, default=131072, help="tokens of the whole sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--network", type=float, default=Machine.network / 1e9, help="GB/s of each GPU's adapter")
    given = parser.parse_args(arguments)
    machine = replace(Machine(), network=given.network * 1e9)
    print("\n".join(table(given.seqlen, given.heads, given.heads_kv, given.head_dim, machine)))


if __name__ == "__main__":
    main()
