"""Which changes of a source leave its machine code alone, and which do not."""

from __future__ import annotations

import pytest

from microsdpa.jit import machine_code, nvrtc

KERNEL = """
namespace here {
constexpr int STEP = 3;
constexpr int OTHER = 9;
__device__ const int TABLE[4] = {5, 7, 11, 13};
struct Params { const int* in; int* out; int count; };

template <int N>
__launch_bounds__(128) __global__ void scale(const __grid_constant__ Params params) {
  __shared__ int tile[64 * N];
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x % 64] = params.in[at] * STEP;
  __syncthreads();
  if (at < params.count) params.out[at] = tile[63 - threadIdx.x % 64] + READ;
}
}  // namespace here
"""
PLAIN, FROM_MEMORY = KERNEL.replace("READ", "1"), KERNEL.replace("READ", "TABLE[threadIdx.x % 4]")
TARGETS = "sm_89", "sm_90a", "compute_89"


def made(text: str, target: str, expression: str = "here::scale<2>") -> bytes:
    name = f"{abs(hash(text))}.cu"  # as another file, of which line tables speak
    return nvrtc.compile_cubin(text, name, expression, target, ("-std=c++17", "-lineinfo")).code


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tile", "rows_of_this_block"),
        ("Params", "Arguments"),
        ("STEP", "A_STEP_OF_ANOTHER_NAME"),
        ("\n", "\n\n\n"),
        ("constexpr int OTHER = 9;", ""),
        (
            "constexpr int OTHER = 9;",
            "constexpr int OTHER = 10; constexpr float A[] = {1.f, 2.f}; constexpr int AB = 1;",
        ),
    ],
)
def test_names_lines_and_constants_that_nothing_reads_do_not_count(target: str, old: str, new: str) -> None:
    assert old in PLAIN
    before, after = made(PLAIN, target), made(PLAIN.replace(old, new), target)
    assert before != after
    assert machine_code.differences(before, after) == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_and_its_namespace_may_be_renamed(target: str) -> None:
    renamed = PLAIN.replace("here", "a_longer_name").replace("scale", "multiply")
    after = made(renamed, target, "a_longer_name::multiply<2>")
    assert machine_code.differences(made(PLAIN, target), after) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("STEP = 3", "STEP = 5"),
        ("64 * N", "65 * N"),
        ("int count;", "int count; int unread[2];"),
        ("__launch_bounds__(128)", "__launch_bounds__(256)"),
        ("{5, 7, 11, 13}", "{5, 7, 11, 17}"),
        ("at < params.count", "at <= params.count"),
    ],
)
def test_everything_that_the_gpu_sees_counts(target: str, old: str, new: str) -> None:
    assert old in FROM_MEMORY
    before, after = made(FROM_MEMORY, target), made(FROM_MEMORY.replace(old, new), target)
    assert machine_code.differences(before, after) != []


def test_another_target_is_other_code() -> None:
    assert machine_code.differences(made(PLAIN, "sm_80"), made(PLAIN, "sm_86")) != []


def test_what_is_no_machine_code_is_refused() -> None:
    with pytest.raises(ValueError, match="ELF"):
        machine_code.differences(made(PLAIN, "sm_89"), b"nothing")
    with pytest.raises(ValueError, match="cubin or PTX"):
        machine_code.differences(b"nothing", b"nothing")
