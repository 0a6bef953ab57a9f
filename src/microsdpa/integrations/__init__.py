"""Libraries that microsdpa registers itself with, on demand; they are imported only then."""

from microsdpa.integrations import diffusers, transformers

__all__ = ["diffusers", "transformers"]
