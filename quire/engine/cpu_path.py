"""CpuPath: what an engine on a CPU has of the native library, and why.

Weights stay packed unless a dtype was asked for, and steps are one native call each where all the
model's layers can be recorded. On other devices, and without the library, nothing of it happens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attn.backend import AttentionBackend
from quire.attn.native import NativeAttention
from quire.config import Decision, EngineArgs, EngineConfig
from quire.memory.pool import PagePool
from quire.memory.sizing import size_text
from quire.models.decoder import Decoder
from quire.native.library import Library, find_library
from quire.native.linear import NativeLinear
from quire.native.panels import Panels
from quire.native.tape import NotRecordable
from quire.nn.linear import GatedLinear
from quire.runner.tapes import Tapes


@dataclass(frozen=True, slots=True)
class CpuPath:
    library: Library | None
    reason: str  # why this instruction set, or no library; empty on other devices
    keeps_packed: bool

    @staticmethod
    def of(args: EngineArgs, device: torch.device) -> CpuPath:
        if device.type != "cpu":
            return CpuPath(None, "", False)
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        library, reason = find_library()
        if library is not None:
            library.set_threads(torch.get_num_threads())
        return CpuPath(library, reason, library is not None and args.dtype == "auto")

    def decisions(self, model: Decoder) -> list[Decision]:
        if not self.reason:
            return []
        isa = self.library.isa if self.library else "torch"
        made = [Decision("cpu kernels", isa, self.reason)]
        panels = _panels(model)
        if any(part.is_coded for part in panels):
            size = size_text(sum(part.num_bytes for part in panels))
            made.append(Decision("weights", f"packed, {size}", "in the numbers the file holds"))
        return made

    def attention(self, backend: AttentionBackend, model: Decoder) -> AttentionBackend:
        """With a cache in fp16 beside packed weights, where the backend can keep one."""
        if isinstance(backend, NativeAttention) and any(part.is_coded for part in _panels(model)):
            return NativeAttention(torch.float16)
        return backend

    def record(
        self,
        model: Decoder,
        backend: AttentionBackend,
        pool: PagePool,
        config: EngineConfig,
        decisions: list[Decision],
    ) -> Tapes | None:
        """Steps as one call; None: layer by layer."""
        if self.library is None or config.enforce_eager or model.dtype != torch.float32:
            return None
        try:
            with torch.inference_mode():
                tapes = Tapes(model, backend, pool, config.sched.max_num_batched_tokens)
        except NotRecordable as error:
            decisions.append(Decision("steps", "layer by layer", str(error)))
            return None
        num_ops = len(tapes.whole.tape.ops)
        decisions.append(Decision("steps", "one call", f"{num_ops} native operations recorded"))
        return tapes


def _panels(model: Decoder) -> list[Panels]:
    kernels = [linear.kernel for linear in model.linears()]
    kernels = [k.kernel if isinstance(k, GatedLinear) else k for k in kernels]
    return [part for k in kernels if isinstance(k, NativeLinear) for part in k.parts]
