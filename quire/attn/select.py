"""Which attention backend: capabilities against needs, with the reason, or why none fits."""

from __future__ import annotations

import torch

from quire.attn.backend import AttentionBackend, AttnCaps, AttnSpec
from quire.errors import NotSupported
from quire.registry import Registry

# In order of preference.
BACKENDS = Registry(
    "attention backend",
    {
        "triton": "quire.attn.triton:TritonAttention",
        "native": "quire.attn.native:NativeAttention",
        "cpu": "quire.attn.cpu:CpuAttention",
        "reference": "quire.attn.reference:ReferenceAttention",
    },
)
LATENT_BACKENDS = Registry(
    "latent attention backend",
    {
        "triton": "quire.attn.latent_triton:LatentTriton",
        "native": "quire.attn.latent_native:LatentNative",
        "cpu": "quire.attn.latent_cpu:LatentCpu",
        "reference": "quire.attn.latent_reference:LatentReference",
    },
)
DEVICES = {
    "triton": "cuda",
    "native": "cpu",
    "cpu": "cpu",
}  # saves importing a backend the device rules out


def select_backend(
    name: str | None, device: torch.device, dtype: torch.dtype, spec: AttnSpec
) -> tuple[str, AttentionBackend]:
    """The named backend, or the first that can do the job."""
    table = BACKENDS if spec.value_dim is None else LATENT_BACKENDS
    declined = []
    for candidate in [name] if name else table.entries:
        if not name and DEVICES.get(candidate, device.type) != device.type:
            declined.append(f"{candidate}: not for {device.type}")
            continue
        kind = table.get(candidate)
        reason = why_not(kind.caps, device, dtype, spec)
        if reason is None:
            try:
                return candidate, kind(dtype)
            except NotSupported as error:  # the machine lacks something
                reason = str(error)
        declined.append(f"{candidate}: {reason}")
    raise NotSupported(
        f"no attention backend fits device={device.type}, dtype={dtype},"
        f" head_dim={spec.head_dim}, page_size={spec.page_size}; tried " + "; ".join(declined)
    )


def why_not(caps: AttnCaps, device: torch.device, dtype: torch.dtype, spec: AttnSpec) -> str | None:
    if device.type not in caps.devices:
        return f"not for {device.type}"
    if dtype not in caps.dtypes:
        return f"not for {dtype}"
    if caps.head_dims is not None and spec.head_dim not in caps.head_dims:
        return f"head_dim {spec.head_dim} not among {sorted(caps.head_dims)}"
    if caps.value_dims is not None and spec.value_dim not in caps.value_dims:
        return f"latents of {spec.value_dim} not among {sorted(caps.value_dims)}"
    if caps.page_sizes is not None and spec.page_size not in caps.page_sizes:
        return f"page_size {spec.page_size} not among {sorted(caps.page_sizes)}"
    return None
