"""Where `import flash_attn` and `import flash_attn_interface` look."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = {
    "flash_attn": "microsdpa.flash_attn",
    "flash_attn.flash_attn_interface": "microsdpa.flash_attn",
    "flash_attn_interface": "microsdpa.flash_attn.interface",
}
"""Modules by the names that other packages import, and what they have here."""
FUNCTIONS = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
_installed: dict[str, ModuleType] = {}


def install() -> None:
    """Let `import flash_attn` and `import flash_attn_interface` find these functions, in this process, from now on.

    Raises:
        RuntimeError: another package of one of these names is imported already.
    """
    for name in NAMES:
        if name in sys.modules and sys.modules[name] is not _installed.get(name):
            raise RuntimeError(
                f"{name} is imported already, from {getattr(sys.modules[name], '__file__', 'elsewhere')}"
            )
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
