"""The emulator: the GPU's execution model on a CPU, with every kernel compiled from its own source.

It makes asynchrony deterministic: a missing wait, fence or barrier fails every time, with the line that misses it.
docs/emulator.md says what is modelled and what is not.
"""
