"""What microsdpa is compared with, one adapter a peer."""

from __future__ import annotations

from microsdpa.errors import InvalidArgument
from microsdpa.evidence.peers.cudnn_fp8 import CudnnFp8
from microsdpa.evidence.peers.flash_attn import FlashAttention2, FlashAttention3, FlashAttention3Fp8, FlashAttention4
from microsdpa.evidence.peers.flash_infer import FlashInfer
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors
from microsdpa.evidence.peers.ours import Microsdpa, MicrosdpaEightBit, ours
from microsdpa.evidence.peers.sage_attention import SageAttention
from microsdpa.evidence.peers.torch_flex import TorchFlex, TorchFlexFlash
from microsdpa.evidence.peers.torch_sdpa import TorchCudnn, TorchEfficient, TorchFlash, TorchMath, TorchSdpa
from microsdpa.evidence.peers.triton_fused import TritonFused
from microsdpa.evidence.peers.xformers_cutlass import Xformers

__all__ = [
    "PEERS",
    "Call",
    "Implementation",
    "Microsdpa",
    "MicrosdpaEightBit",
    "Tensors",
    "choose",
    "ours",
    "slug",
]

PEERS: tuple[type[Implementation], ...] = (
    TorchSdpa,
    TorchFlash,
    TorchCudnn,
    TorchEfficient,
    TorchMath,
    TorchFlex,
    TorchFlexFlash,
    Xformers,
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    FlashInfer,
    TritonFused,
    CudnnFp8,
    FlashAttention3Fp8,
    SageAttention,
)


def slug(name: str) -> str:
    """A peer's name on the command line: "torch FLASH" is torch-flash."""
    return name.lower().replace(" ", "-")


def choose(names: str, eight_bit: bool) -> list[Implementation]:
    """The peers of a comma-separated list of slugs, "all" or "none"; those in 8 bits only where `eight_bit`.

    Raises:
        InvalidArgument: a name is unknown; the message has those that exist.
    """
    known = {slug(peer.name): peer for peer in PEERS}
    wanted = [] if names == "none" else list(known) if names == "all" else names.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InvalidArgument(
            "peers", expected=f"all, none, or some of {', '.join(known)}", got=", ".join(unknown), hint="name peers"
        )
    return [known[name]() for name in wanted if eight_bit or not known[name].arithmetic]
