"""Without a GPU, kernels run in Triton's interpreter. Import this before anything loads triton."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import torch

from tests import assembly

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.language import float32 as fp32
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        # Scalars are arrays of one element there, which NumPy 2.4 refuses as loop bounds.
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index

    _convert = interpreter._convert_float

    def _convert_with_rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
        # To the nearest even one, as GPUs do it; the interpreter cuts off.
        if source.is_fp32() and target.is_fp8e4nv():
            floats = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
            return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if not (source.is_fp32() and target.is_bf16()):
            return _convert(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), bits >> 16 | 64, rounded).astype(np.uint16)

    _dot = interpreter.InterpreterBuilder.create_dot

    def _dot_of_floats(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        # Bits of bf16 are whole numbers there, and would be multiplied as such.
        if a.dtype.is_bf16() and b.dtype.is_bf16():
            a, b = (
                interpreter.TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), fp32)
                for t in (a, b)
            )
        if a.dtype.is_fp8e4nv() and b.dtype.is_fp8e4nv():
            a, b = (
                interpreter.TensorHandle(
                    torch.from_numpy(t.data).view(torch.float8_e4m3fn).float().numpy(), fp32
                )
                for t in (a, b)
            )
        floats = all(t.dtype.is_fp32() or t.dtype.is_fp16() for t in (a, b))
        if not (floats and d.dtype.scalar.is_fp32()):
            return _dot(self, a, b, d, *rest)
        # NumPy's library sums in an order that follows the shape on some CPUs; in fp64 none shows.
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)

    interpreter._convert_float = _convert_with_rounding
    interpreter.InterpreterBuilder.create_dot = _dot_of_floats

    class _Made(NamedTuple):
        values: list[Any]

        def get_result(self, index: int) -> Any:
            return self.values[index]

    def _assembled(
        self: Any, text: str, constraints: str, values: list[Any], types: list[Any], *rest: Any
    ) -> _Made:
        """Two numbers of 16 bits in a register, neighbours in a row."""
        (words,) = values
        registers = np.ascontiguousarray(words.data).view(np.uint32)
        made = assembly.run(text, [registers], len(types))
        handles = []
        for x, kind in zip(made, types, strict=True):
            dtype = np.float16 if kind.scalar.is_fp16() else np.uint16
            bits = np.ascontiguousarray(x).view(dtype)
            handles.append(interpreter.TensorHandle(bits, kind.scalar))
        return _Made(handles)

    interpreter.InterpreterBuilder.create_inline_asm = _assembled
