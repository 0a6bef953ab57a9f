"""What the emulator refuses, each in a kernel of a few lines, with the message and the line that it names."""
# ruff: noqa: E501

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from harness import kernel, run_inline

from microsdpa.emulate import build
from microsdpa.emulate.run import EmulationError, Schedule
from microsdpa.errors import CompileError
from microsdpa.kernels import catalogue

KERNEL = "inline float sum(float4 v) { return v.x + v.y + v.z + v.w; } template <int UNUSED>\n__global__ void kernel(const __grid_constant__ Params p) {\n%s\n}\n}\n"
SHARED = "  __shared__ float s[64];\n"
REDUCED = "  __shared__ __align__(16) float s[64];\n  s[threadIdx.x] = 1.0f;\n  __syncthreads();\n  "

REFUSED = {
    "read past a buffer": (
        "p.out[threadIdx.x] = p.in[993 + threadIdx.x];",
        r"inline.cu:3: read of 4 bytes outside every buffer: at byte \d+ of in",
    ),
    "write past a buffer": (
        "p.out[1000 + threadIdx.x] = 0.0f;",
        r"write of 4 bytes outside every buffer: at byte \d+ of out",
    ),
    "write to an input": ("const_cast<float*>(p.in)[threadIdx.x] = 0.0f;", "write to in, which is an input"),
    "null pointer": ("const float* volatile null = nullptr;\n  p.out[0] = *null;", "outside every buffer"),
    "misaligned read": (
        "p.out[threadIdx.x] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.in) + 2);",
        "misaligned read of 4 bytes",
    ),
    "shared memory past its end": (
        SHARED + "volatile int at = 4096;\n  s[at + threadIdx.x] = 1.0f;",
        "inline.cu:5: .*outside every buffer",
    ),
    "unwritten shared memory": (
        SHARED + "p.out[threadIdx.x] = s[threadIdx.x];",
        "inline.cu:4: read of shared memory that nothing has written: byte",
    ),
    "race of a write and a read": (
        SHARED + "s[threadIdx.x] = 1.0f;\n  p.out[threadIdx.x] = s[threadIdx.x ^ 1];",
        r"inline.cu:5: (race: this reads byte .* that thread \d+ wrote at inline.cu:4|read of shared memory that nothing)",
    ),
    "race of a read and a write": (
        SHARED
        + "s[threadIdx.x] = 1.0f;\n  __syncwarp();\n  p.out[threadIdx.x] = s[threadIdx.x ^ 1];\n  s[threadIdx.x] = 2.0f;",
        r"race: this (writes byte .* read at inline.cu:6|reads byte .* wrote at inline.cu:7)",
    ),
    "race of two writes": (SHARED + "s[0] = threadIdx.x;", r"race: this writes byte .* wrote at inline.cu:4"),
    "shuffles do not order memory": (
        SHARED
        + "s[threadIdx.x] = 1.0f;\n  __shfl_sync(0xffffffffu, 1.0f, 0);\n  p.out[threadIdx.x] = s[threadIdx.x ^ 1];",
        "race: this reads",
    ),
    "cp.async without a wait": (
        SHARED
        + "cp_async<4>(&s[threadIdx.x], p.in + threadIdx.x);\n  cp_async_commit();\n  p.out[threadIdx.x] = s[threadIdx.x];",
        r"inline.cu:6: read of shared memory that cp.async of thread \d+ at .*inline.cu:4 has in flight: a wait is missing",
    ),
    "cp.async read by another thread without a barrier": (
        SHARED
        + "cp_async<4>(&s[threadIdx.x], p.in + threadIdx.x);\n  cp_async_commit();\n  cp_async_wait<0>();\n  p.out[threadIdx.x] = s[threadIdx.x ^ 1];",
        "race: this reads|in flight|nothing has written",
    ),
    "cp.async to what is still read": (
        SHARED + "s[threadIdx.x] = 1.0f;\n  __syncwarp();\n  p.out[threadIdx.x] = s[threadIdx.x ^ 1];\n"
        "  cp_async<4>(&s[threadIdx.x], p.in);\n  cp_async_commit();\n  cp_async_wait<0>();",
        "race: this (writes|reads)|in flight",
    ),
    "cp.async past a buffer": (
        SHARED
        + "cp_async<4>(&s[threadIdx.x], p.in + 1000 + threadIdx.x);\n  cp_async_commit();\n  cp_async_wait<0>();",
        "outside every buffer: at byte .* of in",
    ),
    "misaligned cp.async": (
        SHARED + "cp_async<16>(&s[threadIdx.x], p.in + threadIdx.x);\n  cp_async_commit();\n  cp_async_wait<0>();",
        "misaligned cp.async of 16 bytes",
    ),
    "cp.async to global memory": ("cp_async<4>(p.out, p.in);", "cp.async to an address outside shared memory"),
    "misaligned ldmatrix row": (
        SHARED + "s[threadIdx.x] = 0.0f;\n  __syncwarp();\n  uint32 f[1];\n  ldmatrix<1>(f, &s[threadIdx.x + 1]);",
        "misaligned read of 16 bytes",
    ),
    "wmma tile that starts off 32 bytes": (
        "  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> f;\n"
        "  nvcuda::wmma::load_matrix_sync(f, p.in + 4, 16, nvcuda::wmma::mem_row_major);",
        "inline.cu:4: wmma: the tile does not start on 32 bytes",
    ),
    "wmma rows at an odd distance": (
        "  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> f;\n"
        "  nvcuda::wmma::load_matrix_sync(f, p.in, 18, nvcuda::wmma::mem_row_major);",
        "inline.cu:4: wmma: the leading dimension is no multiple of 16 bytes",
    ),
    "more dynamic shared memory than the launch asked for": (
        "  struct Tile { float x[65]; };\n  dynamic_shared<Tile>().x[threadIdx.x] = 1.0f;",
        "inline.cu:4: 260 bytes of dynamic shared memory, launched with 256",
    ),
    "dynamic shared memory past its end": (
        "  struct Tile { float x[64]; };\n  volatile int at = 60;\n  dynamic_shared<Tile>().x[at + threadIdx.x] = 1.0f;",
        "inline.cu:5: access past the end of the 256 bytes of dynamic shared memory|outside every buffer",
    ),
    "race in dynamic shared memory": (
        "  struct Tile { float x[64]; };\n  dynamic_shared<Tile>().x[0] = 1.0f;",
        "inline.cu:4: race: this writes byte",
    ),
    "mbarrier that nothing initialised": (
        "struct S { Mbarrier b; };\n  mbarrier_arrive(dynamic_shared<S>().b);",
        "inline.cu:4: mbarrier.arrive: no mbarrier was initialised at byte",
    ),
    "mbarrier that no thread arrives at": (
        "struct S { Mbarrier b; };\n  S& s = dynamic_shared<S>();\n  if (threadIdx.x == 0) mbarrier_init(s.b, 1);\n"
        "  __syncthreads();\n  mbarrier_wait(s.b, 0);",
        "deadlock; threads 0-63 wait for an mbarrier at inline.cu:7",
    ),
    "one arrival too many": (
        "struct S { Mbarrier b; };\n  S& s = dynamic_shared<S>();\n  if (threadIdx.x == 0) {\n    mbarrier_init(s.b, 1);\n"
        "    mbarrier_arrive_expect(s.b, 16);\n    mbarrier_arrive(s.b);\n  }",
        "inline.cu:8: mbarrier at byte .*: more than the 1 arrivals that a phase expects",
    ),
    "data that an mbarrier does not bring": (
        "struct S { Mbarrier b; short x[64]; };\n  S& s = dynamic_shared<S>();\n  if (threadIdx.x == 0) mbarrier_init(s.b, 1);\n"
        "  __syncthreads();\n  if (threadIdx.x == 5) mbarrier_arrive(s.b);\n  s.x[threadIdx.x] = 1;\n"
        "  mbarrier_wait(s.b, 0);\n  p.out[threadIdx.x] = s.x[63 - threadIdx.x];",
        "inline.cu:10: (race: this reads byte|read of shared memory that nothing)",
    ),
    "more registers than there are": (
        "setmaxnreg_inc<256>();\n  setmaxnreg_inc<264>();",
        "expected a multiple of 8 from 24 to 256, got 264",
    ),
    "registers that go up by going down": (
        "setmaxnreg_dec<40>();\n  setmaxnreg_dec<48>();",
        "setmaxnreg.dec: 48 registers, where the warp has 40",
    ),
    "peer outside the cluster": (
        "struct S { float x; };\n  store_peer(peer_address(&dynamic_shared<S>().x, 1), 1.0f);",
        "inline.cu:4: mapa: CTA 1 of a cluster of 1",
    ),
    "wait at the cluster's barrier without arrival": (
        "cluster_wait();",
        "barrier.cluster.wait: this thread has not arrived",
    ),
    "wgmma with a descriptor past shared memory": (
        "float d[16];\n  wgmma_fence();\n  const uint64 t = matrix_descriptor(&dynamic_shared<float>(), 128, 256, Swizzle::NONE);\n"
        "  wgmma<__half, 32>(d, t, t, false);",
        "inline.cu:6: wgmma: bytes .* of .* of shared memory",
    ),
    "wgmma with an illegal descriptor": (
        "float d[16];\n  wgmma_fence();\n  wgmma<__half, 32>(d, 1ull << 60, 0, false);",
        "inline.cu:5: wgmma: illegal matrix descriptor",
    ),
    "bulk reduction without a proxy fence": (
        REDUCED
        + "if (threadIdx.x == 0) {\n  bulk_reduce_add(p.out, s, 256);\n  tma_store_commit();\n  tma_store_wait();\n  }",
        "bulk reduction of byte .* wrote, with no fence.proxy.async",
    ),
    "bulk reduction of global memory without a proxy fence": (
        REDUCED
        + "fence_proxy_async();\n  p.out[threadIdx.x] = 1.0f;\n  __syncthreads();\n  "
        + "if (threadIdx.x == 0) bulk_reduce_add(p.out, s, 256);",
        "bulk reduction of global memory that thread .* of block 0 wrote, with no fence.proxy.async.global",
    ),
    "bulk reduction of global memory behind a proxy fence of another thread": (
        REDUCED
        + "fence_proxy_async();\n  __syncthreads();\n  p.out[threadIdx.x] = 1.0f;\n  fence_proxy_async_global();\n  "
        + "if (threadIdx.x == 0) bulk_reduce_add(p.out, s, 256);",
        "bulk reduction of global memory that thread .* of block 0 wrote, with no fence.proxy.async.global",
    ),
    "bulk reduction without a wait": (
        REDUCED + "fence_proxy_async();\n  __syncthreads();\n  if (threadIdx.x == 0) bulk_reduce_add(p.out, s, 256);",
        "a bulk reduction is in flight when its thread returns",
    ),
    "bulk reduction of half a vector": (
        REDUCED
        + "fence_proxy_async();\n  __syncthreads();\n  if (threadIdx.x == 0) bulk_reduce_add(p.out + 1, s, 16);",
        "bulk reduction: expected a multiple of 16 bytes on addresses aligned to 16",
    ),
    "turn that ends before its bulk reduction": (
        REDUCED
        + "fence_proxy_async();\n  __syncthreads();\n  if (threadIdx.x == 0) {\n  bulk_reduce_add(p.out, s, 256);\n  tma_store_commit();\n  end_turn(reinterpret_cast<int32*>(p.out + 64), 1);\n  }",
        "end of a turn: this thread has a bulk store in flight",
    ),
    "deadlock": (
        "if (threadIdx.x < 16) __syncwarp(0xffffu); else __shfl_sync(0xffffffffu, 1.0f, 0);",
        "divergent warp|deadlock",
    ),
    "deadlock at a named barrier": (
        "if (threadIdx.x < 32) named_barrier_sync(1, 64);",
        "deadlock; threads 0-31 wait for a named barrier at inline.cu:3",
    ),
    "divergent __syncthreads": (
        "if (threadIdx.x < 32) __syncthreads();\n  else __syncthreads();",
        r"divergent __syncthreads: thread \d+ waits at inline.cu",
    ),
    "barrier with other counts": (
        "named_barrier_sync(1, threadIdx.x < 32 ? 64 : 32);",
        "barrier 1: .. threads expected here, but .. by thread|deadlock; threads 0-31 wait",
    ),
    "barrier of a broken warp": ("named_barrier_sync(1, 40);", "expected a multiple of 32 threads"),
    "two arrivals in one phase of a barrier": (
        "if (threadIdx.x < 32) { named_barrier_arrive(1, 64); named_barrier_arrive(1, 64); }",
        r"barrier 1: thread \d+ arrives twice in one phase: a wait is missing",
    ),
    "arrivals at a barrier where nobody waits": (
        "if (threadIdx.x < 32) named_barrier_arrive(1, 64);",
        "32 threads have arrived at barrier 1, at which nobody waits: a wait is missing",
    ),
    "barrier number": ("named_barrier_sync(16, 32);", "expected a number from 0 to 15"),
    "mask without the caller": ("if (threadIdx.x % 32 == 3) __syncwarp(1u);", "does not name the calling lane"),
    "mask with a lane that has returned": ("if (threadIdx.x % 32 == 5) return;\n  __syncwarp();", "lane"),
    "different collectives in one warp": (
        "if (threadIdx.x % 2) __ballot_sync(0xffffffffu, 1); else __any_sync(0xffffffffu, 1);",
        "divergent warp: this lane is at __",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_every_schedule(tmp_path: Path, name: str) -> None:
    body, message = REFUSED[name]
    for index, schedule in enumerate(Schedule(seed, late) for seed in range(3) for late in (True, False)):
        with pytest.raises(EmulationError) as caught:
            run_inline(KERNEL % f"  {body}" if "\n" not in body else KERNEL % body, tmp_path / str(index), 64, schedule)
        assert re.search(message, caught.value.problem), caught.value.problem
        assert caught.value.problem.startswith("block 0")


@pytest.mark.parametrize(("released", "message"), [(24, ""), (32, r"deadlock.*setmaxnreg\.inc")])
def test_registers_come_from_what_the_block_was_launched_with(tmp_path: Path, released: int, message: str) -> None:
    """384 threads have 168 each, 64,512 in all: an H200 hangs where 65,536 are claimed."""
    body = f"  if (threadIdx.x < 128) setmaxnreg_dec<{released}>(); else setmaxnreg_inc<240>();"
    said = ""
    try:
        run_inline(KERNEL % body, tmp_path, 384)
    except EmulationError as error:
        said = error.problem
    assert re.search(message, said, re.DOTALL) if message else not said


ALLOWED = {
    "a barrier": (SHARED + "s[threadIdx.x] = p.in[threadIdx.x];\n  __syncthreads();\n  p.out[threadIdx.x] = s[63 - threadIdx.x];", lambda i: 63 - i),
    "a warp barrier": (SHARED + "s[threadIdx.x] = p.in[threadIdx.x];\n  __syncwarp();\n  p.out[threadIdx.x] = s[threadIdx.x ^ 31];", lambda i: i ^ 31),
    "threads that return before a barrier": ("if (threadIdx.x >= 32) return;\n  __syncthreads();\n  p.out[threadIdx.x] = p.in[threadIdx.x];", lambda i: i),
    "half a warp": ("if (threadIdx.x % 32 < 16) p.out[threadIdx.x] = __shfl_xor_sync(0xffffu, p.in[threadIdx.x], 1);", lambda i: i ^ 1),
    "two halves of a word": (
        "__shared__ __half h[64];\n  h[threadIdx.x] = __float2half(p.in[threadIdx.x]);\n  p.out[threadIdx.x] = __half2float(h[threadIdx.x]);",
        lambda i: i,
    ),
    "a named barrier between producers and consumers": (
        SHARED + "if (threadIdx.x < 32) { s[threadIdx.x] = p.in[threadIdx.x]; named_barrier_arrive(1, 64); return; }\n"
        "  named_barrier_sync(1, 64);\n  p.out[threadIdx.x - 32] = s[threadIdx.x - 32];",
        lambda i: i,
    ),
    "dynamic shared memory": (
        "  struct Tile { float x[64]; };\n  Tile& t = dynamic_shared<Tile>();\n  t.x[threadIdx.x] = p.in[threadIdx.x];\n"
        "  __syncthreads();\n  p.out[threadIdx.x] = t.x[63 - threadIdx.x];",
        lambda i: 63 - i,
    ),
    "a reduction": ("const float x = warp_sum(p.in[threadIdx.x]);\n  p.out[threadIdx.x] = x;", lambda i: 496 if i < 32 else 1520),
    "reading what another read": (
        SHARED + "s[threadIdx.x] = p.in[threadIdx.x];\n  __syncthreads();\n  p.out[threadIdx.x] = s[0] + s[1] + s[threadIdx.x];",
        lambda i: 1 + i,
    ),
    "a bulk reduction of what threads wrote to global memory, behind proxy fences and a barrier": (
        REDUCED + "fence_proxy_async();\n  p.out[threadIdx.x] = p.in[threadIdx.x];\n  fence_proxy_async_global();\n  __syncthreads();\n"
        "  if (threadIdx.x == 0) {\n  bulk_reduce_add(p.out, s, 256);\n  tma_store_commit();\n  tma_store_wait();\n  }",
        lambda i: 1 + i,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_right_passes_in_every_schedule(tmp_path: Path, name: str) -> None:
    body, expected = ALLOWED[name]
    for index, schedule in enumerate(Schedule(seed, late) for seed in range(3) for late in (True, False)):
        out, _ = run_inline(KERNEL % body, tmp_path / str(index), 64, schedule)
        written = ~out.isnan()
        assert written.any()
        assert torch.equal(out[written], torch.tensor([float(expected(i)) for i in range(1024)])[written])


BANKS = {
    "consecutive words": ("s[threadIdx.x]", 0),
    "one word for all": ("s[5]", 0),
    "every second word": ("s[threadIdx.x * 2]", 1),
    "a column of 32": ("s[threadIdx.x * 32]", 31),
    "a padded column": ("s[threadIdx.x * 33]", 0),
    "16 bytes a lane": ("sum(reinterpret_cast<const float4*>(s)[threadIdx.x])", 0),
    "16 bytes, rows of 64 bytes": ("sum(reinterpret_cast<const float4*>(s)[threadIdx.x * 4])", 12),
}


@pytest.mark.parametrize("name", BANKS)
def test_bank_conflicts_are_counted(tmp_path: Path, name: str) -> None:
    access, conflicts = BANKS[name]
    body = (
        "  __shared__ __align__(16) float s[2048];\n  for (int i = 0; i < 64; ++i) s[i * 32 + threadIdx.x] = p.in[i];\n"
        f"  __syncthreads();\n  p.out[threadIdx.x] = {access};"
    )
    _, report = run_inline(KERNEL % body, tmp_path, 32, banks=True)
    by_line = {site.place: site for site in report.bank_sites}
    assert by_line["inline.cu:4"].conflicts == 0
    assert by_line["inline.cu:6"].conflicts == conflicts
    assert report.bank_conflicts == conflicts


def test_a_place_in_a_function_has_the_lines_of_its_callers(tmp_path: Path) -> None:
    """A function that is called twice is compiled once: which call it was is on the stack."""
    functions = """
__device__ __forceinline__ void store(float* to, int at) {
  for (int i = 0; i < 2; ++i) to[at + i] = 1.0f;
}
__device__ __forceinline__ void twice(float* to, int at) {
  store(to, at);
  store(to + 4, 2 * at);
}
"""
    text = functions + KERNEL % "  twice(p.out, 0);\n  twice(p.out, 510);"
    with pytest.raises(EmulationError, match=r"inline.cu:3 < inline.cu:7 < inline.cu:12: write of 4 bytes outside"):
        run_inline(text, tmp_path)


def test_an_object_that_a_function_returns_is_seen_where_it_is_stored(tmp_path: Path) -> None:
    """The compiler does not tell of a call's result that goes straight to memory: such functions are inlined."""
    functions = """
struct Four { float x[4]; };
__device__ __forceinline__ Four four(float x) { return {{x, x, x, x}}; }
"""
    body = """
  __shared__ Four s[32];
  s[threadIdx.x] = four(p.in[threadIdx.x]);
  s[threadIdx.x] = four(p.in[threadIdx.x + 1]);
  p.out[threadIdx.x] = s[threadIdx.x].x[0];
  s[threadIdx.x ^ 1] = four(0.0f);"""
    with pytest.raises(
        EmulationError, match=r"race: this writes byte \d+ of shared memory that thread \d+ (read|wrote)"
    ):
        run_inline(functions + KERNEL % body, tmp_path / "race")
    out, report = run_inline(functions + KERNEL % body.rsplit("\n", 1)[0], tmp_path / "right")
    assert (out[:32] == torch.arange(1, 33)).all()
    assert report.counters["shared_write_bytes"] == 2 * 32 * 16


def test_functions_that_may_be_called_are_told_from_those_that_are_inlined() -> None:
    called = (
        *("void f()", "static int f()", "explicit Name(int x)", "float* at(int i)", "static const P& of(const Q& q)"),
        *("uint64 advance(uint64 x)", "static constexpr bool one()", "const char* name()"),
    )
    inlined = ("Quadruple f()", "T from_float(float x)", "uint4 fetch()", "auto f()", "static Vector<float, 4> f()")
    text = '#line 1 "{}"\n__device__ __forceinline__ {} {{}}\n'
    for function in called:
        assert "__function__" in build._inlined(text.format("common/a.cuh", function)), function
        assert "__forceinline__" in build._inlined(text.format(build.OPERANDS_OF_CALLERS[0], function)), function
    for function in inlined:
        assert "__function__" not in build._inlined(text.format("common/a.cuh", function)), function


def test_an_instruction_that_is_not_emulated_fails_to_build_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="refused test/inline") as caught:
        kernel(KERNEL % "  p.out[0] = __nanosleep(100);", tmp_path)
    assert "__nanosleep" in caught.value.log
    assert "inline.cu:3" in caught.value.log
    assert caught.value.source is not None
    assert "__nanosleep" in Path(caught.value.source).read_text()


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    try:
        for named, found in ((None, "finds neither"), ("icpc", "CXX=icpc, which is not a program on the path")):
            monkeypatch.setenv("CXX", named) if named else monkeypatch.delenv("CXX", raising=False)
            build.compiler.cache_clear()
            with pytest.raises(CompileError, match=rf"needs a C\+\+ compiler, .*{found}.*: install g\+\+"):
                build.compiler()
    finally:
        build.compiler.cache_clear()


def test_an_unwritable_cache_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        out, _ = run_inline(KERNEL % "  p.out[threadIdx.x] = 7.0f;", tmp_path / "tree")
    assert (out[:32] == 7).all()


def test_kernels_are_cached(tmp_path: Path) -> None:
    spec = catalogue("sm_89")[0]
    assert build.load(spec) is build.load(spec)
