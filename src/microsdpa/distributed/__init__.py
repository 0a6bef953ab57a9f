"""Attention of sequences that are spread over several GPUs: over a group or a DeviceMesh dimension of torch."""

from microsdpa.distributed.api import attention, explain, shard, unshard

__all__ = ["attention", "explain", "shard", "unshard"]
