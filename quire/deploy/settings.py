"""DeploySettings: everything `quire deploy` may be told, and what of it Ray is told.

Plain values alone cross to Ray: strings, numbers, and dictionaries of them. Ray is not imported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quire.errors import BadRequest

POLICY = "quire.deploy.scaling:GoodputPolicy"
MOST_ONGOING = 1_000  # of a replica; whether it has room, the server behind it says itself
AFTER_DRAIN_S = 20.0  # for processes to end
HEALTH_S, HEALTH_TIMEOUT_S = 5.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What one replica must know."""

    words: tuple[str, ...]  # what its `quire serve` is told, but for the address
    needs_key: bool
    drain_s: float
    target_ttft_s: float  # 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySettings:
    words: tuple[str, ...]
    name: str = "quire"  # of the application and its only deployment
    route: str = "/"
    address: str = ""  # of a Ray cluster; "": one of this machine alone
    host: str = "127.0.0.1"
    needs_key: bool = False  # Ray listens beyond this machine
    port: int = 8000
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 16.0  # open at a replica, running and waiting
    target_ttft_s: float = 0.0  # more replicas while too many first tokens come later; 0: none
    late_share: float = 0.05  # of requests, that may
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    surge_percent: int = 25  # replicas of an update beside those that they replace
    drain_s: float = 120.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.min_replicas > self.max_replicas:
            raise BadRequest(
                f"got --min-replicas {self.min_replicas} and --max-replicas {self.max_replicas};"
                " give a larger --max-replicas"
            )
        if not self.route.startswith("/") or (len(self.route) > 1 and self.route.endswith("/")):
            raise BadRequest(f"got --route {self.route!r}, want / or a path such as /chat")

    def replica(self) -> dict[str, Any]:
        """What each replica is made with."""
        own = ReplicaSettings(
            words=self.words,
            needs_key=self.needs_key,
            drain_s=self.drain_s,
            target_ttft_s=self.target_ttft_s,
        )
        return asdict(own) | {"words": list(self.words)}

    def options(self) -> dict[str, Any]:
        """Of the deployment, by Ray Serve's names."""
        return {
            "name": self.name,
            "max_ongoing_requests": MOST_ONGOING,
            "max_surge_percent": self.surge_percent,
            "graceful_shutdown_timeout_s": self.drain_s + AFTER_DRAIN_S,
            "graceful_shutdown_wait_loop_s": 0.5,
            "health_check_period_s": HEALTH_S,
            "health_check_timeout_s": HEALTH_TIMEOUT_S,
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_requests,
                "upscale_delay_s": self.upscale_delay_s,
                "downscale_delay_s": self.downscale_delay_s,
                "policy": {
                    "policy_function": POLICY,
                    "policy_kwargs": {
                        "target_requests": self.target_requests,
                        "late_share": self.late_share,
                    },
                },
            },
        }
