"""cuDNN's FP8 attention through its Python frontend: E4M3 in, E4M3 out, one scale a tensor."""

from __future__ import annotations

from typing import Any

import torch

from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers.implementation import Call, Implementation, Tensors, misaligned
from microsdpa.evidence.peers.quantized import E4M3_MAX, per_tensor_e4m3


class CudnnFp8(Implementation):
    """pygraph.sdpa_fp8. On Hopper its output is FP8 as well."""

    name = "cuDNN FP8"
    arithmetic = "e4m3"
    module = "cudnn"
    package = "nvidia-cudnn-frontend"
    configuration = "`pygraph.sdpa_fp8`, E4M3 in and out, quantized before timing, a scale a tensor"

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def version(self) -> str:
        """Of the frontend and of the library behind it."""
        try:
            import cudnn
        except ImportError:
            return ""
        return f"{super().version}, cuDNN {cudnn.backend_version_string()}"

    def refuses(self, case: Case) -> str:
        """Causal masks are aligned to the upper left."""
        return misaligned(case, "upper_left")

    def bind(self, case: Case, tensors: Tensors, out: torch.Tensor) -> Call:
        """Builds the graph for this shape; a call is its execution on torch's current stream."""
        import cudnn

        e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        if self._handle is None:
            self._handle = cudnn.create_handle()
        handle = self._handle
        graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)

        def scalar(name: str, value: torch.Tensor | float, memory: dict[Any, torch.Tensor]) -> Any:
            descriptor = graph.tensor(name=name, dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=fp32)
            memory[descriptor] = torch.as_tensor(value, device=out.device).float().view(1, 1, 1, 1).clone()
            return descriptor

        memory: dict[Any, torch.Tensor] = {}
        operands: dict[str, Any] = {}
        for name, tensor in zip(("q", "k", "v"), tensors, strict=True):
            quantized, scale = per_tensor_e4m3(tensor)
            quantized = quantized.transpose(1, 2).contiguous().transpose(1, 2)  # [B, S, H, D] memory, its usual layout
            descriptor = graph.tensor(name=name, dim=quantized.shape, stride=quantized.stride(), data_type=e4m3)
            memory[descriptor] = quantized
            operands[name] = descriptor
            operands[f"descale_{name}"] = scalar(f"descale_{name}", scale, memory)
        largest = float(tensors[2].abs().amax())  # an average of values is no larger than the largest of them
        output_scale = E4M3_MAX / max(largest, 1e-30)
        operands |= {
            "descale_s": scalar("descale_s", 1 / E4M3_MAX, memory),
            "scale_s": scalar("scale_s", E4M3_MAX, memory),
            "scale_o": scalar("scale_o", output_scale, memory),
        }
        o, _, amax_s, amax_o = graph.sdpa_fp8(
            **operands,
            generate_stats=False,
            attn_scale=case.head_dim**-0.5 if case.scale is None else case.scale,
            use_causal_mask=case.causal is not None,
        )
        shape = (case.batch, case.seqlen_q, case.heads, case.head_dim)
        result = torch.empty(shape, dtype=torch.float8_e4m3fn, device=out.device).transpose(1, 2)
        o.set_output(True).set_dim(result.shape).set_stride(result.stride()).set_data_type(e4m3)
        memory[o] = result
        for amax in (amax_s, amax_o):
            amax.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(fp32)
            memory[amax] = torch.zeros(1, 1, 1, 1, device=out.device)
        graph.build([cudnn.heur_mode.A])
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=out.device)

        def run() -> tuple[torch.Tensor, float]:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(memory, workspace, handle=handle)
            return result, output_scale

        return run

    def decode(self, result: tuple[torch.Tensor, float]) -> torch.Tensor:
        """The output's numbers."""
        quantized, scale = result
        return quantized.float() / scale
