"""What `microsdpa evidence resign` asks of one checkout, in a process of its own: signatures, launches, machine code.

Run as a script, never imported. It takes recorded.py, the specifications, the signatures and the compilation of the
checkout whose package is named, old or new.

The host launcher is not loaded, and the package's __init__ does not run: neither is needed, and an old launcher would
have to be built first.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "microsdpa"
FOLLOWING = ("then", "next_kernel", "preparation")
"""What checkouts call the fields of a KernelSpec that have the kernels after it and before it."""
NAMING = frozenset(
    {"name", "source", "template", "template_args", "local_memory", "low_occupancy", "params", "flags", *FOLLOWING}
)
"""Fields of a KernelSpec that say how a kernel is called or made; the others say how it is launched."""


class OfCheckout:
    """Finds the package's modules below one directory and nowhere else, whatever is installed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As importlib wants it."""
        if not name.startswith(f"{PACKAGE}."):
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None:
            raise ModuleNotFoundError(f"there is no module {name}", name=name)
        return found


def take_modules_of(package: Path) -> ModuleType:
    """Make `import microsdpa.…` take the modules below `package`; gives its module evidence.recorded."""
    root = ModuleType(PACKAGE)
    root.__path__ = [str(package)]
    launcher = ModuleType(f"{PACKAGE}.runtime.launcher")
    launcher.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules |= {PACKAGE: root, launcher.__name__: launcher}
    sys.meta_path.insert(0, OfCheckout)
    return importlib.import_module(f"{PACKAGE}.evidence.recorded")


def module(name: str) -> Any:
    """A module of the checkout."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def alone(stage: Any) -> Any:
    """A stage without those after it and before it."""
    others = {field.name for field in dataclasses.fields(stage)} & set(FOLLOWING)
    return dataclasses.replace(stage, **dict.fromkeys(others))


def launch(stage: Any) -> dict[str, str]:
    """How a stage is launched, where its specification departs from the plain way."""
    return {
        field.name: repr(getattr(stage, field.name))
        for field in dataclasses.fields(stage)
        if field.name not in NAMING and getattr(stage, field.name) != field.default
    }


def describe(recorded: ModuleType, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each row the kernels by their fields: signature, name and stages; or the reason why there are none."""
    sign, error_type = module("jit.signature").code_signature, module("errors").MicrosdpaError
    answers: list[dict[str, Any]] = []
    for job in jobs:
        try:
            kernels = recorded.of_row(job["row"], job["target"])
        except error_type as error:
            answers.append({"error": str(error)})
            continue
        found = {
            field: {
                "signature": sign(kernel.spec, job["target"]),
                "name": kernel.spec.name,
                "numbers": list(kernel.numbers),
                "stages": [
                    {"signature": sign(alone(stage), job["target"]), "launch": launch(stage) | {"grid": repr(grid)}}
                    for stage, grid in zip(kernel.spec.stages, kernel.grids, strict=True)
                ],
            }
            for field, kernel in kernels.items()
        }
        answers.append({"kernels": found})
    return answers


def compiled(recorded: ModuleType, jobs: list[dict[str, Any]], directory: Path) -> dict[str, dict[str, Any]]:
    """The named stages by signature and target: a file with the code, and what ptxas says; or why there is none.

    Each job names a row, its target, what to compile for (it, or its PTX), a field and a stage's number.
    """
    sign, error_type = module("jit.signature").code_signature, module("errors").MicrosdpaError
    compile_kernel = module("jit").compile_kernel

    def one(job: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        kernel = recorded.of_row(job["row"], job["target"])[job["field"]]
        stage = alone(kernel.spec.stages[job["stage"]])
        name = f"{sign(stage, job['target'])}.{job['compiled_for']}"
        try:
            made = compile_kernel(stage, job["compiled_for"])
        except error_type as error:
            return name, {"error": str(error).splitlines()[0]}
        path = directory / f"{name}.bin"
        path.write_bytes(made.cubin)
        return name, {"file": str(path), "resources": made.resources.as_dict()}

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without holding the GIL
        return dict(pool.map(one, jobs))


def main() -> None:
    """Answer the request on standard input, a line of JSON, in the file that it names."""
    request = json.loads(sys.stdin.read())
    try:
        recorded = take_modules_of(Path(request["package"]))
        answer: dict[str, Any] = {"nvrtc": module("jit.nvrtc").version()}
        if "directory" in request:
            answer["answers"] = compiled(recorded, request["jobs"], Path(request["directory"]))
        else:
            answer["answers"] = describe(recorded, request["jobs"])
    except (ImportError, AttributeError, TypeError) as error:  # other names, or other arguments, than this one's
        answer = {"layout": f"{type(error).__name__}: {error}"}
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
