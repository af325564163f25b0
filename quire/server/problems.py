"""Problem: an answer other than success, with OpenAI's error body; and how our errors become one.

What clients read is a message of our own making or of `quire.errors`; never the text of some
library's exception. Anthropic's and Ollama's endpoints wrap the same problem in their own body.
"""

from __future__ import annotations

import msgspec

from quire.batches.files import QuotaExceeded
from quire.errors import BadRequest, EngineDead, NotSupported, Overloaded, QuireError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MAX_MESSAGE = 1_000


class Problem(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
        allow: str | None = None,
    ) -> None:
        """`closes`: what else came over this connection cannot be trusted. `allow`: methods."""
        super().__init__(message)
        self.status, self.param, self.code, self.closes = status, param, code, closes
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.retry_after_s, self.allow = retry_after_s, allow

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error")

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        found: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.allow is not None:
            found.append((b"allow", self.allow.encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self.closes or self.status in (408, 413, 431):
            found.append((b"connection", b"close"))
        return tuple(found)

    def body(self, style: str = "openai") -> bytes:
        if style == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            error = {"type": kind, "message": self.message}
            return msgspec.json.encode({"type": "error", "error": error})
        if style == "ollama":
            return msgspec.json.encode({"error": self.message})
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


class Failed(QuireError):
    """The engine ended this request, and only this one, on an error."""


class Refused(QuireError):
    """The engine is well, and cannot do what an operator asks in the state it is in."""


class Expired(QuireError):
    """A deadline passed: the request's own, or the one for its first token."""

    def __init__(self, message: str, *, is_queue: bool) -> None:
        super().__init__(message)
        self.is_queue = is_queue


def problem_of(error: BaseException) -> Problem | None:
    """The answer for an error we know; None for what only a bug can raise."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, BadRequest):
        return Problem(400, str(error), param=error.param)
    if isinstance(error, NotSupported):
        return Problem(400, str(error), code="not_supported")
    if isinstance(error, Overloaded):
        return Problem(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, QuotaExceeded):
        return Problem(429, str(error), code="insufficient_quota")  # as OpenAI calls it
    if isinstance(error, EngineDead):
        return Problem(503, str(error), code="engine_unavailable", retry_after_s=2)
    if isinstance(error, Refused):
        return Problem(409, str(error), code="conflict")
    if isinstance(error, Failed):
        return Problem(500, str(error), code="generation_failed")
    if isinstance(error, Expired):
        if error.is_queue:
            return Problem(503, str(error), code="queue_timeout", retry_after_s=10)
        return Problem(504, str(error), code="deadline_exceeded")
    return None
