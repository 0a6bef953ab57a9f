from __future__ import annotations

import pytest

from microsdpa.jit.occupancy import occupancy

KB = 1024


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared_bytes", "ctas", "warps", "limit"),
    [
        # 128 registers: 4096 a warp, 4 warps in each of an SM's four parts.
        ("sm_90a", 128, 128, 16 * KB, 4, 16, "registers"),
        ("sm_90a", 128, 129, 16 * KB, 3, 12, "registers"),
        ("sm_80", 256, 32, 0, 8, 64, "warps"),
        ("sm_89", 256, 32, 0, 6, 48, "warps"),
        ("sm_89", 32, 32, 0, 24, 24, "CTAs"),
        ("sm_86", 32, 32, 0, 16, 16, "CTAs"),
        # Every CTA takes 1 KB more than it asks for: two of 49 KB fit into 100 KB, two of 50 do not.
        ("sm_89", 128, 64, 49 * KB, 2, 8, "shared memory"),
        ("sm_120", 128, 64, 50 * KB, 1, 4, "shared memory"),
        ("sm_89", 128, 64, 100 * KB, 0, 0, "shared memory"),
        ("sm_90a", 128, 64, 227 * KB, 1, 4, "shared memory"),
        # The notes' plan for the L4: six CTAs of 256 threads with 48 registers and 27 KB each.
        ("sm_89", 256, 48, 27 * KB, 3, 24, "shared memory"),
        ("sm_89", 256, 48, 0, 5, 40, "registers"),
    ],
)
def test_occupancy(
    target: str, threads: int, registers: int, shared_bytes: int, ctas: int, warps: int, limit: str
) -> None:
    found = occupancy(target, threads, registers, shared_bytes)
    assert (found.ctas, found.warps, found.limit) == (ctas, warps, limit)
    assert found.fraction == warps / (48 if target in ("sm_86", "sm_89", "sm_120") else 64)


def test_an_unknown_target_is_an_error() -> None:
    with pytest.raises(KeyError):
        occupancy("sm_75", 128, 32, 0)
