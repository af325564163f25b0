"""Responses, conversations and chat completions that are stored, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.batches.files import Page
from quire.kept.conversations import Conversations
from quire.kept.records import CHAT, CONVERSATION, RESPONSE, Bounds, NewRecord, Records
from quire.server.background_responses import BackgroundResponses
from quire.server.responses import make_response
from quire.server.shelf import Shelf
from tests.server.fakes import Bench

LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(api_keys=("alice", "bob"))
    made.server.shelf = Shelf(tmp_path)
    yield made
    made.server.shelf.close()


def sdk(bench: Bench, key: str = "alice", is_strict: bool = True) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key=key,
        max_retries=0,
        http_client=bench.client(),
        _strict_response_validation=is_strict,
    )


def shelf_of(bench: Bench) -> Shelf:
    assert bench.server.shelf is not None
    return bench.server.shelf


# ------------------------------------------------------------ responses


def test_a_chain_is_put_together(bench: Bench) -> None:
    """Red when a turn is lost, doubled or out of order, or a deleted one is still used."""

    async def work() -> None:
        client = sdk(bench)
        bench.link.answer = "Hello Ada."
        first = await client.responses.create(model="tiny", input="I am Ada.", metadata={"a": "b"})
        assert first.store is True and first.previous_response_id is None
        bench.link.answer = "Ada."
        second = await client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": "Who am I?"}],
            instructions="Be brief.",
            previous_response_id=first.id,
        )
        assert bench.link.prompt().split("<s>")[1:] == [
            *("system: Be brief.|", "user: I am Ada.|", "assistant: Hello Ada.|"),
            *("user: Who am I?|", "assistant: "),
        ]
        third = await client.responses.create(
            model="tiny", input="Sure?", previous_response_id=second.id
        )
        assert bench.link.prompt().count("<s>") == 6  # instructions are not carried over
        found = await client.responses.retrieve(second.id)
        assert found == second and found.output_text == "Ada."
        listed = [item async for item in client.responses.input_items.list(third.id, limit=2)]
        texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
        assert texts == ["Sure?", "Ada.", "Who am I?", "Hello Ada.", "I am Ada."]
        upwards = await client.responses.input_items.list(third.id, order="asc", limit=1)
        assert upwards.has_more and upwards.data[0].id == listed[-1].id
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="which was deleted"):
            await client.responses.create(
                model="tiny", input="And now?", previous_response_id=third.id
            )
        assert (await client.responses.retrieve(third.id)).id == third.id

    asyncio.run(work())


def test_a_stream_is_stored_before_it_ends(bench: Bench) -> None:
    """Red when a client that has the last event cannot go on from the response."""

    async def work() -> None:
        client = sdk(bench)
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        async for event in stream:
            if event.type == "response.completed":
                stored = await client.responses.retrieve(event.response.id)
                assert stored.output_text == event.response.output_text == "Hello there."
        with pytest.raises(openai.NotFoundError):
            made = await client.responses.create(model="tiny", input="hi", store=False)
            assert made.store is False
            await client.responses.retrieve(made.id)

    asyncio.run(work())


def test_calls_and_references_go_round(bench: Bench) -> None:
    """Red when a tool's result does not find the call it answers, or an item its text."""

    async def work() -> None:
        client = sdk(bench)
        bench.link.answer = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        first = await client.responses.create(model="tiny", input="hi", tools=[LOOK])
        (call,) = first.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        bench.link.answer = "It is blue."
        second = await client.responses.create(
            model="tiny", input=[result], tools=[LOOK], previous_response_id=first.id
        )
        assert f"tool: blue for {call.call_id}|" in bench.link.prompt()
        items = await client.responses.input_items.list(second.id, order="asc")
        kinds = [item.type for item in items.data]
        assert kinds == ["message", "function_call", "function_call_output"]
        named: Any = [{"type": "item_reference", "id": second.output[0].id}]
        named.append({"role": "user", "content": "Thanks."})
        await client.responses.create(model="tiny", input=named)
        assert "assistant: It is blue.|<s>user: Thanks.|" in bench.link.prompt()
        named[0]["id"] = "msg_" + "0" * 36
        with pytest.raises(openai.NotFoundError, match="no such item"):
            await client.responses.create(model="tiny", input=named)

    asyncio.run(work())


async def until_done(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(5):
        while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
    return found


def worked(bench: Bench, work: Callable[[], Awaitable[None]]) -> None:
    """Run with somebody who makes responses in the background."""

    async def both() -> None:
        made = BackgroundResponses(bench.server, shelf_of(bench), make_response)
        task = asyncio.create_task(made.run())
        try:
            await work()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(both())


def test_responses_in_the_background(bench: Bench) -> None:
    """Red when polling never ends, or what was made in the background cannot be gone on from."""

    async def work() -> None:
        client = sdk(bench)
        queued = await client.responses.create(model="tiny", input="hi", background=True)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        done = await until_done(client, queued.id)
        assert (done.status, done.output_text) == ("completed", "Hello there.")
        assert done.id == queued.id and done.created_at == queued.created_at
        assert done.usage is not None and done.usage.output_tokens > 0
        await client.responses.create(model="tiny", input="more", previous_response_id=done.id)
        assert "<s>user: hi|<s>assistant: Hello there.|<s>user: more|" in bench.link.prompt()
        assert (await client.responses.cancel(done.id)).status == "completed"  # too late
        for wrong in ({"store": False}, {"stream": True}, {"input": []}):
            asked: Any = {"model": "tiny", "input": "hi", "background": True, **wrong}
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(**asked)
        plain = await client.responses.create(model="tiny", input="hi")
        with pytest.raises(openai.BadRequestError, match="not in the background"):
            await client.responses.cancel(plain.id)

    worked(bench, work)


def test_a_response_in_the_background_can_be_cancelled(bench: Bench) -> None:
    async def work() -> None:
        client = sdk(bench)
        bench.link.answer = "x" * 5_000
        first = await client.responses.create(model="tiny", input="hi", background=True)
        with pytest.raises(openai.ConflictError):
            await client.responses.create(model="tiny", input="a", previous_response_id=first.id)
        while bench.link.num_open == 0:
            await asyncio.sleep(0.001)
        assert (await client.responses.cancel(first.id)).status == "cancelled"
        async with asyncio.timeout(5):
            while bench.link.num_open:
                await asyncio.sleep(0.001)
        assert (await client.responses.retrieve(first.id)).status == "cancelled"
        second = await client.responses.create(model="tiny", input="hi", background=True)
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)

    worked(bench, work)


def test_a_response_in_the_background_outlives_its_process(bench: Bench, tmp_path: Path) -> None:
    """Red when what a dead process had begun is never done, or done twice."""

    async def begin() -> str:
        made = await sdk(bench).responses.create(model="tiny", input="hi", background=True)
        (record,) = await shelf_of(bench).records.open_records()
        assert await shelf_of(bench).records.move(record, "in_progress", record.body)
        return made.id

    id = asyncio.run(begin())
    shelf_of(bench).close()
    bench.server.shelf = Shelf(tmp_path)
    bench.link.answer = "After all."

    async def work() -> None:
        assert (await until_done(sdk(bench), id)).output_text == "After all."

    worked(bench, work)
    assert len(bench.link.submitted) == 1


def test_a_failure_in_the_background_is_told(bench: Bench) -> None:
    async def work(gone: asyncio.Event) -> None:
        client = sdk(bench)
        first = await client.responses.create(model="tiny", input="hi")
        queued = await client.responses.create(
            model="tiny", input="hi", background=True, previous_response_id=first.id
        )
        await client.responses.delete(first.id)
        gone.set()
        done = await until_done(client, queued.id)
        assert done.status == "failed" and done.error is not None
        assert "no such response" in done.error.message

    # Nobody works on it before the response it goes on from is gone.
    asyncio.run(_with_a_late_worker(bench, work))


async def _with_a_late_worker(
    bench: Bench, work: Callable[[asyncio.Event], Awaitable[None]]
) -> None:
    made = BackgroundResponses(bench.server, shelf_of(bench), make_response)
    due = asyncio.Event()

    async def later() -> None:
        await due.wait()
        await made.run()

    task = asyncio.create_task(later())
    try:
        await work(due)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ------------------------------------------------------------ conversations


def test_a_conversation_grows(bench: Bench) -> None:
    """Red when a response does not see what was said before, or leaves nothing behind."""

    async def work() -> None:
        client = sdk(bench)
        made = await client.conversations.create(
            items=[{"type": "message", "role": "system", "content": "Be kind."}],
            metadata={"topic": "x"},
        )
        for text in ("one", "two"):
            bench.link.answer = f"Heard {text}."
            said = await client.responses.create(
                model="tiny", input=text, conversation=made.id, store=text == "one"
            )
            assert said.conversation is not None and said.conversation.id == made.id
        assert bench.link.prompt().split("<s>")[1:] == [
            *("system: Be kind.|", "user: one|", "assistant: Heard one.|"),
            *("user: two|", "assistant: "),
        ]
        items = [i async for i in client.conversations.items.list(made.id, order="asc", limit=2)]
        assert [i.role for i in items] == ["system", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
        one = await client.conversations.items.retrieve(items[1].id, conversation_id=made.id)  # type: ignore[arg-type]
        assert one == items[1]
        await client.conversations.items.delete(items[1].id, conversation_id=made.id)  # type: ignore[arg-type]
        added = await client.conversations.items.create(
            made.id, items=[{"role": "user", "content": "three"}]
        )
        assert added.data[0].type == "message"
        await client.responses.create(model="tiny", input="four", conversation={"id": made.id})
        assert "user: one|" not in bench.link.prompt()
        assert "<s>user: three|<s>user: four|" in bench.link.prompt()
        changed = await client.conversations.update(made.id, metadata={"topic": "y"})
        assert (await client.conversations.retrieve(made.id)) == changed
        assert changed.metadata == {"topic": "y"}
        with pytest.raises(openai.BadRequestError, match="want one of them"):
            await client.responses.create(
                model="tiny", input="x", conversation=made.id, previous_response_id=said.id
            )
        assert (await client.conversations.delete(made.id)).deleted
        for look in (
            lambda: client.conversations.retrieve(made.id),
            lambda: client.responses.create(model="tiny", input="x", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await look()

    asyncio.run(work())


def test_what_no_model_can_read_is_not_taken(bench: Bench) -> None:
    async def work() -> None:
        client = sdk(bench)
        image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
        with pytest.raises(openai.BadRequestError, match="input_image"):
            await client.conversations.create(items=[image])
        with pytest.raises(openai.BadRequestError, match="at most 20"):
            await client.conversations.create(items=[{"role": "user", "content": "x"}] * 21)

    asyncio.run(work())


# ------------------------------------------------------------ chat completions


def test_stored_chat_completions(bench: Bench) -> None:
    """Red when a completion cannot be found again, or one is stored that nobody asked to."""

    async def work() -> None:
        client = sdk(bench)
        hi: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        whole = await client.chat.completions.create(
            model="tiny", messages=hi, store=True, metadata={"run": "1"}
        )
        stream = await client.chat.completions.create(
            model="tiny", messages=hi, store=True, metadata={"run": "2"}, stream=True
        )
        (streamed,) = {chunk.id async for chunk in stream}
        await client.chat.completions.create(model="tiny", messages=hi)
        found = [one async for one in client.chat.completions.list(limit=1)]
        assert [one.id for one in found] == [whole.id, streamed]
        assert {one.choices[0].message.content for one in found} == {"Hello there."}
        tagged = await client.chat.completions.list(metadata={"run": "2"}, model="tiny")
        assert [one.id for one in tagged.data] == [streamed]
        assert (await client.chat.completions.list(model="other")).data == []
        again = await client.chat.completions.retrieve(whole.id)
        assert again.choices == whole.choices and again.usage == whole.usage
        lax = sdk(bench, is_strict=False)  # the SDK's type of a message knows assistants alone
        said = await lax.chat.completions.messages.list(whole.id)
        assert [(m.content, m.id) for m in said.data] == [("hi", f"{whole.id}-0")]
        await client.chat.completions.update(whole.id, metadata={"run": "3"})
        third = await client.chat.completions.list(metadata={"run": "3"})
        assert [one.id for one in third.data] == [whole.id]
        assert (await client.chat.completions.delete(whole.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.retrieve(whole.id)

    asyncio.run(work())


# ------------------------------------------------------------ tenants and bounds


def test_others_see_nothing(bench: Bench) -> None:
    """Red when a key reaches what another key stored, by whatever way leads there."""

    async def work() -> None:
        alice, bob = sdk(bench), sdk(bench, "bob")
        said = await alice.responses.create(model="tiny", input="secret")
        talk = await alice.conversations.create(items=[{"role": "user", "content": "secret"}])
        chat = await alice.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "secret"}], store=True
        )
        named: Any = [{"type": "item_reference", "id": said.output[0].id}]
        for look in (
            lambda: bob.responses.retrieve(said.id),
            lambda: bob.responses.delete(said.id),
            lambda: bob.responses.cancel(said.id),
            lambda: bob.responses.create(model="tiny", input="x", previous_response_id=said.id),
            lambda: bob.responses.create(model="tiny", input=named),
            lambda: bob.responses.create(model="tiny", input="x", conversation=talk.id),
            lambda: bob.conversations.retrieve(talk.id),
            lambda: bob.conversations.delete(talk.id),
            lambda: bob.conversations.update(talk.id, metadata={}),
            lambda: bob.chat.completions.retrieve(chat.id),
            lambda: bob.chat.completions.update(chat.id, metadata={}),
            lambda: bob.chat.completions.delete(chat.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await look()  # type: ignore[no-untyped-call]
        for listing in (
            bob.responses.input_items.list(said.id),
            bob.conversations.items.list(talk.id),
            bob.chat.completions.messages.list(chat.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await listing
        assert (await bob.chat.completions.list(after=chat.id)).data == []
        # The same id under another key is another completion.
        body = {"messages": [{"role": "user", "content": "mine"}], "store": True}
        own = chat.id.removeprefix("chatcmpl-")
        head = {"authorization": "Bearer bob", "x-request-id": own}
        await bench.send("/v1/chat/completions", body, **head)
        hers = await sdk(bench, "alice", False).chat.completions.messages.list(chat.id)
        his = await sdk(bench, "bob", False).chat.completions.messages.list(chat.id)
        assert [m.content for m in (*hers.data, *his.data)] == ["secret", "mine"]

    asyncio.run(work())


def new(id: str, size: int, **fields: Any) -> NewRecord:
    return NewRecord("a", id, RESPONSE, b"x" * size, b"", **fields)


def test_what_was_not_used_for_longest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a key holds more than it may, or a chain in use loses its beginning."""
    now = [1_000]
    monkeypatch.setattr("quire.kept.records.time.time", lambda: float(now[0]))

    async def work() -> None:
        shelf = Shelf(tmp_path, Bounds(max_age_s=100, max_bytes=1_000))
        records = shelf.records

        async def ids() -> list[str]:
            rows = await records.page("a", RESPONSE, Page(99, None, False), None, {})
            return [row.id for row in rows]

        for number, previous in enumerate((None, "r0", None)):
            now[0] += 1
            await records.put(new(f"r{number}", 300, previous_id=previous))
        assert [r.id for r in await records.chain("a", "r1")] == ["r0", "r1"]
        now[0] += 1
        await shelf.database.call(lambda db: records.use(db, "a", ["r0", "r1"]))
        await records.put(new("r3", 300))
        assert await ids() == ["r0", "r1", "r3"]
        await records.put(NewRecord("b", "r9", RESPONSE, b"x" * 900, b""))  # another's own
        assert await ids() == ["r0", "r1", "r3"]
        with pytest.raises(Exception, match="at most 1000"):
            await records.put(new("r4", 2_000))
        assert await ids() == ["r0", "r1", "r3"]  # a refusal costs nothing
        now[0] += 101
        assert await ids() == [] and await records.get("a", "r3", RESPONSE) is None
        assert await records.sweep() == 4
        shelf.close()

    asyncio.run(work())


def test_a_conversation_counts_its_items(tmp_path: Path) -> None:
    async def work() -> None:
        shelf = Shelf(tmp_path, Bounds(1_000, 2_000))
        await shelf.records.put(NewRecord("a", "c1", CONVERSATION, b"", b""))
        item = {"id": "i1", "text": "x" * 500}
        talks = Conversations(Records(shelf.database, shelf.records.bounds))
        assert await talks.add("a", "c1", [item, {**item, "id": "i2"}])
        assert not await talks.add("a", "c2", [item]) and not await talks.add("b", "c1", [item])

        async def held() -> int:
            query = "SELECT bytes FROM kept_sizes WHERE tenant = 'a'"
            return int(await shelf.database.call(lambda db: db.execute(query).fetchone()[0]))

        before = await held()
        assert before > 1_000
        assert await talks.delete_item("a", "c1", "i1") and await held() < before - 500
        assert await shelf.records.delete("a", "c1", CONVERSATION) and await held() == 0
        rest = await shelf.database.call(
            lambda db: db.execute("SELECT count(*) FROM kept_items").fetchone()[0]
        )
        assert rest == 0
        shelf.close()

    asyncio.run(work())


def test_a_response_that_cannot_be_stored_is_answered(bench: Bench) -> None:
    """Red when a full store costs a client the answer it waited for."""
    shelf_of(bench).records.bounds = Bounds(1_000, 10)
    reply = bench.post("/v1/responses", {"input": "hi"}, authorization="Bearer alice")
    assert reply.status_code == 200 and reply.json()["store"] is False
    assert "not stored" in reply.headers["x-quire-warning"]
    body = {"messages": [{"role": "user", "content": "hi"}], "store": True}
    chat = bench.post("/v1/chat/completions", body, authorization="Bearer alice")
    assert chat.status_code == 200 and "not stored" in chat.headers["x-quire-warning"]


# ------------------------------------------------------------ without a store


@pytest.mark.parametrize(
    "field",
    [{"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"background": True}],
)
def test_without_a_store_what_needs_one_is_refused(field: dict[str, Any]) -> None:
    reply = Bench().post("/v1/responses", {"input": "hi", **field})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in field
    assert "--no-store" in reply.json()["error"]["message"]


def test_without_a_store_nothing_is_found() -> None:
    bench = Bench()
    stored = bench.post("/v1/responses", {"input": "hi"}).json()
    assert stored["store"] is False
    for path in (f"/v1/responses/{stored['id']}", "/v1/chat/completions", "/v1/conversations/x"):
        assert bench.get(path).status_code == 404
    warned = bench.post("/v1/responses", {"input": "hi", "store": True})
    assert "--no-store" in warned.headers["x-quire-warning"]


def test_any_model_that_is_answered_is_there() -> None:
    """Red when a client that looks its model up first is told that there is none."""
    assert Bench().get("/v1/models/gpt-9").status_code == 404
    found = Bench(accept_any_model=True).get("/v1/models/gpt-9").json()
    assert (found["id"], found["root"]) == ("gpt-9", "tiny")
    assert json.loads(Bench().get("/v1/models/default").content)["root"] == "tiny"


def test_kinds_do_not_mix(bench: Bench) -> None:
    """Red when an id of one kind is found under another's path."""
    made = bench.post("/v1/responses", {"input": "hi"}, authorization="Bearer alice").json()

    async def look(kind: str) -> object:
        (tenant,) = {r.tenant for r in await shelf_of(bench).records.chain(*_who(bench, made))}
        return await shelf_of(bench).records.get(tenant, made["id"], kind)

    assert asyncio.run(look(RESPONSE)) is not None
    assert asyncio.run(look(CHAT)) is None and asyncio.run(look(CONVERSATION)) is None


def _who(bench: Bench, made: dict[str, Any]) -> tuple[str, str]:
    caller = bench.server.keys.caller({"authorization": "Bearer alice"})
    assert caller is not None
    return caller.salt, made["id"]
