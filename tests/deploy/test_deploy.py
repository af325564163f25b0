"""`quire deploy` without Ray: what Ray is told, how many replicas, what one of them does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli import deploy as verb
from quire.deploy.first_tokens import LateFirstTokens
from quire.deploy.replica import EngineReplica, without_root
from quire.deploy.scaling import LATE, GoodputPolicy
from quire.deploy.settings import POLICY, DeploySettings, ReplicaSettings
from quire.errors import BadRequest, EngineDead
from tests.tiny_folder import write_tiny_folder

FLAGS = ("--device", "cpu", "--load-format", "dummy", "--threads", "1", "--no-store")


def told(*words: str) -> DeploySettings:
    found: DeploySettings = verb.settings_of(verb.build_parser().parse_args(list(words)))
    return found


def test_words_of_two_verbs() -> None:
    """Red when a flag of `quire serve` does not reach the replicas, or one of Ray's does."""
    settings = told("default", "--max-replicas", "4", "--max-num-seqs", "8", "--cpus", "2")
    assert settings.words == ("default", "--max-num-seqs", "8", "--threads", "2")
    assert (settings.min_replicas, settings.max_replicas) == (1, 4)
    assert told("--gpus", "1").words == ()
    with pytest.raises(BadRequest, match="did you mean --max-num-seqs"):
        told("default", "--max-num-seq", "8")
    for secret in ("--api-key", "--admin-api-key"):
        with pytest.raises(BadRequest, match="whoever may look at the cluster"):
            told("default", secret, "secret")
    with pytest.raises(BadRequest, match="--max-replicas"):
        told("default", "--replicas", "2")
    with pytest.raises(BadRequest, match="--route"):
        told("default", "--route", "chat")


def test_what_ray_is_told() -> None:
    """Red when an option is lost on its way, or something other than plain values crosses."""
    settings = told(
        *("default", "--min-replicas", "2", "--max-replicas", "8", "--target-requests", "24"),
        *("--target-ttft", "0.5", "--drain-timeout", "60", "--gpus", "1", "--surge", "0"),
    )
    options = settings.options()
    assert json.loads(json.dumps([options, settings.replica()])) == [options, settings.replica()]
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 8)
    assert scaling["target_ongoing_requests"] == 24.0 <= options["max_ongoing_requests"]
    assert scaling["policy"]["policy_function"] == POLICY
    assert GoodputPolicy(**scaling["policy"]["policy_kwargs"]).target_requests == 24.0
    # Ray lets a replica finish for longer than its server takes at most.
    assert options["graceful_shutdown_timeout_s"] > settings.drain_s == 60.0
    assert options["ray_actor_options"]["num_gpus"] == 1.0 and options["max_surge_percent"] == 0
    assert ReplicaSettings(**settings.replica()).target_ttft_s == 0.5


@pytest.mark.parametrize(
    "requests, replicas, late, wanted",
    [(0, 2, {}, 0), (33, 2, {}, 3), (8, 2, {"a": 0.0, "b": 0.04}, 1), (8, 2, {"a": 0.2}, 3)],
)
def test_how_many_replicas(
    requests: int, replicas: int, late: dict[str, float], wanted: int
) -> None:
    """Red when late first tokens add no replica, or a short queue takes one away meanwhile."""
    policy = GoodputPolicy(target_requests=16.0, late_share=0.05)
    context: Any = SimpleNamespace(
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        total_num_requests=float(requests),
        aggregated_metrics={LATE: late} if late else None,
    )
    assert policy(context)[0] == wanted


def test_which_first_tokens_are_late() -> None:
    def counted(*counts: int) -> str:
        edges = ("0.25", "0.5", "+Inf")
        name = 'quire:time_to_first_token_seconds_bucket{engine="0",le="%s",model_name="m"} %s'
        return "\n".join(name % (e, float(c)) for e, c in zip(edges, counts, strict=True))

    late = LateFirstTokens(0.4)  # counted by the edge below it
    assert late.share("") == 0.0
    assert late.share(counted(8, 10, 10)) == pytest.approx(0.2)
    assert late.share(counted(8, 10, 10)) == 0.0  # none since
    assert late.share(counted(9, 14, 14)) == pytest.approx(0.75)
    assert late.share(counted(1, 1, 2)) == pytest.approx(0.5)  # begun again
    assert LateFirstTokens(0.0).share(counted(0, 0, 5)) == 0.0


def test_a_path_below_a_route() -> None:
    scope = {"type": "http", "path": "/chat/v1/models", "root_path": "/chat"}
    assert without_root(scope)["raw_path"] == b"/v1/models"
    assert without_root({**scope, "path": "/chat"})["path"] == "/"
    assert without_root({**scope, "root_path": ""})["path"] == "/chat/v1/models"


def settings_for(*words: str, **more: Any) -> dict[str, Any]:
    return DeploySettings(words=words, drain_s=5.0, target_ttft_s=10.0, **more).replica()


async def asked(replica: EngineReplica, path: str, body: Any = None) -> tuple[int, bytes]:
    """As Ray would: below a route of the application."""
    parts = [b"" if body is None else json.dumps(body).encode()]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()  # a client that stays
        return {"type": "http.request", "body": parts.pop()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": "/chat" + path,
        "root_path": "/chat",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "client": ("10.1.2.3", 5),
    }
    await replica._app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_a_replica_is_a_whole_server(tmp_path: Path) -> None:
    """Red when a replica is there before its engine, or outlives what Ray thinks of it."""
    folder = write_tiny_folder(tmp_path, max_position_embeddings=512)

    async def work() -> None:
        replica = EngineReplica(settings_for(str(folder), *FLAGS))
        await replica.begin()
        assert (await asked(replica, "/ready"))[0] == 200
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        status, answer = await asked(replica, "/v1/completions", body)
        assert status == 200 and answer.rstrip().endswith(b"data: [DONE]")
        assert b"quire:num_requests_waiting" in (await asked(replica, "/metrics"))[1]  # its own
        await replica.check_health()
        assert await replica.record_autoscaling_stats() == {LATE: 0.0}
        replica._seen_ready = float("-inf")
        replica.upstream.went_down("gone")
        with pytest.raises(EngineDead, match="not ready for"):
            await replica.check_health()
        replica.__del__()
        assert replica.child is not None and not replica.child.is_running()
        with pytest.raises(EngineDead, match="has ended"):
            await replica.check_health()

    asyncio.run(asyncio.wait_for(work(), 120.0))


def test_a_replica_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when Ray is left waiting for a server that ended, or one without a key is let out."""
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)

    with pytest.raises(BadRequest, match="no API key"):
        asyncio.run(EngineReplica(settings_for("default", needs_key=True)).begin())
    with pytest.raises(EngineDead, match="did not start"):
        asyncio.run(EngineReplica(settings_for(str(tmp_path / "nothing"), *FLAGS)).begin())
