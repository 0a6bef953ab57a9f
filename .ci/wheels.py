"""What is held of the wheels in dist/: what is in them, who can install them, how long that takes, how big it is.

python .ci/wheels.py            # the launcher of every wheel, and wheels of its dependencies for every Python
python .ci/wheels.py install    # this machine's wheel beside torch, in an environment of its own, build/clean
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = {"x86_64": 62, "aarch64": 183}
"""Machines that there are wheels for, and their numbers in an ELF header."""
PYTHONS = {f"3.{minor}": f"cp3{minor}" for minor in range(10, 15)} | {"3.14t": "cp314t"}
GLIBC = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
"""Of manylinux tags that torch's oldest system, glibc 2.28, takes."""
LAUNCHER = "microsdpa/runtime/libmicrosdpa_launcher.so"
LIBRARIES = r"lib(tvm_ffi|stdc\+\+|gcc_s|c|m|dl|pthread)\.so|ld-linux-"
MOST_SECONDS, MOST_MEGABYTES = 10.0, 80.0
"""What an install beside torch may take."""
CALL = """
import torch, microsdpa
q = torch.randn(1, 8, 512, 64, dtype=torch.bfloat16)
assert torch.allclose(microsdpa.sdpa(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-2)
print("sdpa on a CPU: right")
"""


def wheels() -> dict[str, Path]:
    """The wheels of dist/, by machine."""
    return {machine: path for machine in MACHINES for path in (ROOT / "dist").glob(f"microsdpa-*_{machine}.whl")}


def look_into(found: dict[str, Path]) -> list[str]:
    """Faults of the launchers: their machine, the libraries that they need, and what they export."""
    faults, exported = [], {}
    for machine, path in found.items():
        with zipfile.ZipFile(path) as wheel, tempfile.NamedTemporaryFile(suffix=".so") as file:
            data = wheel.read(LAUNCHER)
            file.write(data)
            file.flush()
            tables = subprocess.run(
                ["readelf", "-d", "--dyn-syms", "-W", file.name], capture_output=True, text=True, check=True
            ).stdout
        if (number := int.from_bytes(data[18:20], "little")) != MACHINES[machine]:
            faults.append(f"{path.name}: its launcher is of machine {number}, expected {MACHINES[machine]}")
        needed = re.findall(r"NEEDED.*\[(.*)\]", tables)
        faults += [f"{path.name}: its launcher needs {lib}" for lib in needed if not re.match(LIBRARIES, lib)]
        exported[machine] = set(re.findall(r"(?<!UND )\b__tvm_ffi_\w+", tables))
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(exported[machine])} functions, needs {needed}")
    if len(set(map(frozenset, exported.values()))) != 1:
        faults.append(f"the launchers of {', '.join(found)} export different functions")
    return faults + [f"dist/ has no wheel for {machine}" for machine in MACHINES if machine not in found]


def ask_for_dependencies(found: dict[str, Path]) -> list[str]:
    """Python versions and machines for which pip finds no wheel of something that the package depends on.

    torch is left out: pip fetches all of it to answer.
    """
    with zipfile.ZipFile(found[platform.machine()]) as wheel:
        described = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    wanted = [line for line in re.findall(r"^Requires-Dist: (.*)$", described, re.MULTILINE) if "extra ==" not in line]
    wanted = [requirement for requirement in wanted if not requirement.startswith("torch")]
    faults = []
    for machine in MACHINES:
        tags = [f"--platform=manylinux_{version}_{machine}" for version in GLIBC] + [f"--platform=linux_{machine}"]
        tags += [f"--platform=manylinux{year}_{machine}" for year in (2014, 2010)]
        for version, abi in PYTHONS.items():
            command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q"]
            command += ["--target=build/none", "--only-binary=:all:", "--implementation=cp", f"--abi={abi}", *tags]
            command += ["--abi=abi3", f"--python-version={version.rstrip('t')}", *wanted]
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            print(f"Python {version} on {machine}: {'missing' if run.returncode else 'every dependency has a wheel'}")
            if run.returncode:
                faults.append(f"Python {version} on {machine}: {run.stderr.strip().splitlines()[-1]}")
    return faults


def megabytes(directory: Path) -> float:
    """Of the files below a directory."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6


def install(wheel: Path) -> list[str]:
    """Install a wheel beside torch, time and weigh that, and call it where there is no compiler."""
    place = ROOT / "build/clean"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python, quiet = place / "bin/python", ("-m", "pip", "install", "-q", "--disable-pip-version-check")
    subprocess.run([python, *quiet, "-c", ROOT / "constraints.txt", "torch"], check=True)
    packages = next(place.glob("lib/python*/site-packages"))
    before, start = megabytes(packages), time.perf_counter()
    subprocess.run([python, *quiet, wheel], check=True)
    seconds, size = time.perf_counter() - start, megabytes(packages) - before
    print(
        f"pip install beside torch: {seconds:.1f} s (at most {MOST_SECONDS:g}), {size:.0f} MB (at most "
        f"{MOST_MEGABYTES:g})"
    )
    without_compiler = {name: value for name, value in os.environ.items() if name not in ("PATH", "CXX")}
    run = subprocess.run([python, "-I", "-c", CALL], env=without_compiler | {"PATH": "/none"}, check=False)
    faults = ["sdpa fails where there is no compiler"] if run.returncode else []
    if seconds > MOST_SECONDS:
        faults.append(f"the install took {seconds:.1f} s")
    return faults + ([f"the install takes {size:.0f} MB"] if size > MOST_MEGABYTES else [])


def main(arguments: list[str]) -> int:
    """Faults on standard output; 1 if there is one."""
    found = wheels()
    faults = (
        install(found[platform.machine()])
        if arguments == ["install"]
        else look_into(found) + ask_for_dependencies(found)
    )
    print("\n".join(f"FAULT: {fault}" for fault in faults) or "wheels: passed")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
