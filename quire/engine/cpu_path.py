"""CpuPath: what an engine on a CPU has of the native library, and why.

Weights stay packed unless a dtype was asked for, and steps are one native call each where all the
model's layers can be recorded. On other devices, and without the library, nothing of it happens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from quire.attn.backend import AttentionBackend
from quire.attn.latent_native import LatentNative
from quire.attn.native import NativeAttention
from quire.config import Decision, EngineArgs, EngineConfig
from quire.engine.usable_cpus import usable_cpus
from quire.memory.pool import PagePool
from quire.memory.sizing import size_text
from quire.models.decoder import Decoder
from quire.native.library import Library, find_library
from quire.native.tape import NotRecordable
from quire.nn.ops import Ops
from quire.ops.native_ops import NativeOps
from quire.runner.tapes import Tapes

EXPANDED = "float32"


@dataclass(frozen=True, slots=True)
class CpuPath:
    library: Library | None
    reason: str  # why this instruction set, or no library; empty on other devices
    keeps_packed: bool
    form_reason: str = ""  # why weights are kept in the form they have
    is_stored_packed: bool = False  # in other forms than floats

    @staticmethod
    def of(args: EngineArgs, device: torch.device) -> CpuPath:
        if device.type != "cpu":
            return CpuPath(None, "", False)
        threads = args.num_threads or min(torch.get_num_threads(), usable_cpus())
        torch.set_num_threads(threads)
        library, reason = find_library()
        if library is not None:
            library.set_threads(threads)
        keeps = library is not None and args.dtype == "auto"
        why = "as the file holds them" if keeps else f"dtype {args.dtype} was asked for"
        return CpuPath(library, reason, keeps, why)

    def of_packed_files(self) -> CpuPath:
        """The same, with weights that files hold packed."""
        return replace(self, is_stored_packed=self.keeps_packed)

    def rounding_to(self, form: str) -> CpuPath:
        """The same, with weights brought into a form of this name."""
        why = f"rounded at load: {form}, 8 bits for embedding and head"
        return replace(self, form_reason=why)

    def kernel_decisions(self) -> list[Decision]:
        if not self.reason:
            return []
        isa = self.library.isa if self.library else "torch"
        threads = f"{torch.get_num_threads()} threads"
        return [Decision("cpu kernels", f"{isa}, {threads}", self.reason)]

    def decisions(self, ops: Ops) -> list[Decision]:
        made = self.kernel_decisions()
        if isinstance(ops, NativeOps):
            forms = ", ".join(f"{name} {size_text(n)}" for name, n in ops.kept.most_common())
            how = "" if ops.packs is None else f"; {ops.packs.note}"
            made.append(Decision("weights", forms, self.form_reason + how))
            if self.is_stored_packed and (expanded := ops.kept[EXPANDED]):
                why = "no kernel here takes what is stored, or it is fp32; see quire inspect"
                made.append(Decision("expanded weights", f"{EXPANDED} {size_text(expanded)}", why))
        return made

    def attention(self, backend: AttentionBackend, ops: Ops) -> AttentionBackend:
        """With a cache in fp16 beside packed weights, where the backend can keep one."""
        has_codes = isinstance(ops, NativeOps) and ops.has_codes
        if self.keeps_packed and has_codes and isinstance(backend, (NativeAttention, LatentNative)):
            return cast("AttentionBackend", type(backend)(torch.float16))
        return backend

    def record(
        self,
        model: Decoder,
        backend: AttentionBackend,
        pool: PagePool,
        config: EngineConfig,
        decisions: list[Decision],
        taps: tuple[int, ...] = (),
    ) -> Tapes | None:
        """Steps as one call; None: layer by layer. `taps`: see `Tapes`."""
        if self.library is None or config.enforce_eager or model.dtype != torch.float32:
            return None
        try:
            with torch.inference_mode():
                tapes = Tapes(model, backend, pool, config.sched.max_num_batched_tokens, taps)
        except NotRecordable as error:
            decisions.append(Decision("steps", "layer by layer", str(error)))
            return None
        tape = tapes.whole.tape
        how = f"{tape.num_pauses + 1} calls" if tape.num_pauses else "one call"
        decisions.append(Decision("steps", how, f"{len(tape.ops)} native operations recorded"))
        return tapes
