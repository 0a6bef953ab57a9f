"""Attention on wgmma for problems of about one tile of queries per SM."""
