"""Without a GPU, kernels run in Triton's interpreter. Import this before anything loads triton."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        # Scalars are arrays of one element there, which NumPy 2.4 refuses as loop bounds.
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index
