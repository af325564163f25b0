"""The only file that imports Ray: an application of one deployment, started or replaced.

A second `deploy` of the same name is a rolling update: Ray starts replicas of the other kind, sends
them requests once they are ready, and lets the old ones finish.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from quire.deploy.replica import EngineReplica
from quire.deploy.settings import DeploySettings
from quire.errors import EngineDead, NotSupported


def deploy(settings: DeploySettings) -> int:
    """On a cluster: returns once the replicas are ready. On this machine: until told to stop."""
    serve = _connected(settings)
    stop = threading.Event()

    def on_term(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # told twice: at once
        stop.set()

    if not settings.address:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_term)
    try:
        serve.run(application(settings), name=settings.name, route_prefix=settings.route)
    except RuntimeError as error:
        raise EngineDead(f"{settings.name} was not deployed: {error}") from None
    print(f"{settings.name}: http://{settings.host}:{settings.port}{settings.route}", flush=True)
    if not settings.address:
        stop.wait()
        serve.delete(settings.name)  # waits for what is under way
        serve.shutdown()
    return 0


def delete(settings: DeploySettings) -> int:
    _connected(settings).delete(settings.name)
    return 0


def application(settings: DeploySettings) -> Any:
    from ray import serve

    made = serve.deployment(**settings.options())(serve.ingress()(EngineReplica))
    return made.bind(settings.replica())


def _connected(settings: DeploySettings) -> Any:
    try:
        import ray
        from ray import serve
    except ImportError:
        raise NotSupported("quire deploy needs Ray Serve: pip install 'quire[ray]'") from None
    try:
        ray.init(address=settings.address or "local", log_to_driver=True, ignore_reinit_error=True)
    except ConnectionError as error:
        raise NotSupported(f"no Ray cluster at {settings.address}: {error}") from None
    where = "EveryNode" if settings.address else "HeadOnly"
    serve.start(proxy_location=where, http_options={"host": settings.host, "port": settings.port})
    return serve
