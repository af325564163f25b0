"""What a kernel may raise when it is compiled or launched for the first time."""

from __future__ import annotations

from triton.errors import TritonError

__all__ = ["FAILURES"]

# Compilers raise nearly anything.
FAILURES = (
    *(TritonError, RuntimeError, AssertionError, ValueError, TypeError, AttributeError),
    *(LookupError, ArithmeticError, OSError, ImportError),
)
