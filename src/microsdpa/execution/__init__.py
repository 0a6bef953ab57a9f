"""How a call is computed, forward and backward: by a plan, by the emulator, by torch on a CPU."""
