"""Where `import flash_attn` and `import flash_attn_interface` look."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from os import PathLike
from types import ModuleType
from typing import Any

NAMES = {
    "flash_attn": "microsdpa.flash_attn",
    "flash_attn.flash_attn_interface": "microsdpa.flash_attn",
    "flash_attn_interface": "microsdpa.flash_attn.interface",
}
"""Modules by the names that other packages import, and what they have here."""
FUNCTIONS = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
DISTRIBUTIONS = {"flash-attn": ("flash_attn", "2.8.3"), "flash-attn-3": ("flash_attn_interface", "3.0.0")}
"""Names of FlashAttention's distributions: the module that each has, and the version whose signatures these are."""
_installed: dict[str, ModuleType] = {}


class _Distribution(metadata.Distribution):
    """What importlib.metadata says of one of DISTRIBUTIONS."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """One of the files of a distribution's metadata."""
        module, version = DISTRIBUTIONS[self._name]
        header = f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {version}\nSummary: microsdpa.flash_attn\n"
        return {"METADATA": header, "top_level.txt": f"{module}\n"}.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """It has no files.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(f"{self._name}: {path}")


class _Finder(metadata.DistributionFinder):
    """Finds DISTRIBUTIONS, and no modules: those are in sys.modules."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """No module."""

    def find_distributions(
        self,
        context: metadata.DistributionFinder.Context = metadata.DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[metadata.Distribution]:
        """All of DISTRIBUTIONS, or the one of the context's name."""
        wanted = None if context.name is None else context.name.lower().replace("_", "-")
        return (_Distribution(name) for name in DISTRIBUTIONS if wanted in (None, name))


_finder = _Finder()


def install(*, distributions: bool = False) -> None:
    """Let `import flash_attn` and `import flash_attn_interface` find these functions, in this process, from now on.

    With `distributions`, importlib.metadata says that flash-attn 2.8.3 and flash-attn-3 are there, too. transformers
    asks for that before it takes attn_implementation="flash_attention_3"; call this before transformers is imported.

    Raises:
        RuntimeError: another package of one of these names is imported already, or such a distribution is there.
    """
    for name in NAMES:
        if name in sys.modules and sys.modules[name] is not _installed.get(name):
            raise RuntimeError(
                f"{name} is imported already, from {getattr(sys.modules[name], '__file__', 'elsewhere')}"
            )
    if distributions and _finder not in sys.meta_path:
        for name in DISTRIBUTIONS:
            for other in metadata.distributions(name=name):
                raise RuntimeError(f"{name} is there already, in version {other.version}")
        sys.meta_path.append(_finder)
    for name, source in NAMES.items():
        module, ours = ModuleType(name, f"The functions of {source}."), importlib.import_module(source)
        module.__spec__ = ModuleSpec(name, None, origin=ours.__file__, is_package=name == "flash_attn")
        if name == "flash_attn":
            module.__path__ = []
            module.__version__ = ours.__version__  # type: ignore[attr-defined]
        for function in FUNCTIONS:
            setattr(module, function, getattr(ours, function))
        sys.modules[name] = _installed[name] = module
    sys.modules["flash_attn"].flash_attn_interface = sys.modules["flash_attn.flash_attn_interface"]  # type: ignore[attr-defined]


def uninstall() -> None:
    """Take back what install() did; modules that have imported the functions keep them."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
