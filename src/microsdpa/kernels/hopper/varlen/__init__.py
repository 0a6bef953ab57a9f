"""Attention for packed prompts, prompts on a cache and large groups of query heads, on wgmma."""
