"""The description of one call of attention, and every refusal of an argument."""
