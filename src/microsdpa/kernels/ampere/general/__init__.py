"""Attention with every mask, head dimension and layout."""
