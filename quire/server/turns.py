"""Turn: what a response goes on from, and where it is remembered.

`previous_response_id` is a chain of stored responses, `conversation` a stored list of items; either
gives the items before the input. When the response is done, `keep` writes it down before the client
hears of it: whoever has its id can go on from it. `responses.py` makes the response in between.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import dataclass, field
from typing import Any

from quire.errors import BadRequest
from quire.kept.records import CONVERSATION, OPEN, RESPONSE, NewRecord, Record
from quire.obs.log import log_event
from quire.server import sse
from quire.server.files import tenant_of
from quire.server.http import HttpRequest
from quire.server.keeping import Memory, write_down
from quire.server.problems import Problem
from quire.server.responses_input import ResponsesFields
from quire.server.server import Server
from quire.server.shelf import Shelf
from quire.server.stored_items import StoredItem, response_id_of, stored_items


@dataclass(slots=True)
class Turn:
    fields: ResponsesFields
    request: HttpRequest
    shelf: Shelf | None
    history: list[StoredItem] = field(default_factory=list)
    chain_ids: list[str] = field(default_factory=list)
    conversation_id: str | None = None

    @property
    def is_stored(self) -> bool:
        """OpenAI's default is to store. Lines of batches have their answers in a file already."""
        if self.shelf is None:
            return False
        wanted = self.fields.store
        return not self.request.is_background if wanted is None else wanted

    def new_record(self, body: dict[str, Any], request: bytes | None = None) -> NewRecord:
        token = str(body["id"]).removeprefix("resp_")
        return NewRecord(
            tenant=tenant_of(self.request),
            id=body["id"],
            kind=RESPONSE,
            asked=sse.encode(stored_items(self.fields.input, token)),
            body=sse.encode(body),
            status=body["status"],
            previous_id=self.fields.previous_response_id,
            model=body["model"],
            metadata=json.dumps(body["metadata"]),
            request=request,
        )

    async def keep(self, body: dict[str, Any]) -> None:
        """The response is done. What cannot be stored is told in `body` and answered all the same:
        the work is done."""
        if self.shelf is None or not (self.is_stored or self.conversation_id):
            return
        shelf, new = self.shelf, self.new_record(body)

        def failed(error: Exception) -> None:
            body["store"] = False
            self.request.warnings.append(f"the response is not stored: {error}")
            log_event("not_stored", severity=logging.ERROR, id=new.id, reason=str(error))

        memory = Memory(lambda db: self._write(db, shelf, new, body), failed, body)
        await write_down(memory, self.request, shelf.database)

    def _write(
        self, db: sqlite3.Connection, shelf: Shelf, new: NewRecord, body: dict[str, Any]
    ) -> None:
        if self.is_stored:
            shelf.records.put_in(db, new)
        self.after(db, shelf, new, body)

    def after(
        self, db: sqlite3.Connection, shelf: Shelf, new: NewRecord, body: dict[str, Any]
    ) -> None:
        """What else is written when a response is done."""
        shelf.records.use(db, new.tenant, self.chain_ids)
        if self.conversation_id is not None:
            said = [*json.loads(new.asked), *body["output"]]
            shelf.conversations.add_in(db, new.tenant, self.conversation_id, said)

    async def finish(self, record: Record, body: dict[str, Any]) -> bool:
        """The same for a response in the background, unless it was cancelled meanwhile."""
        shelf, new = self.shelf, self.new_record(body)
        assert shelf is not None

        def write(db: sqlite3.Connection) -> bool:
            if not shelf.records.move_in(db, record, new.status, new.body):
                return False
            self.after(db, shelf, new, body)
            return True

        return await shelf.database.call(write)


async def open_turn(fields: ResponsesFields, request: HttpRequest, server: Server) -> Turn:
    """Raises BadRequest or Problem for what is not there to go on from."""
    shelf = server.shelf
    if shelf is None:
        _refuse_stored(fields, request)
        return Turn(fields, request, None)
    if fields.background and request.is_background:
        raise BadRequest(
            "got background=true in a line of a batch, which nobody waits for; leave it out",
            param="background",
        )
    if fields.background and fields.store is False:
        raise BadRequest("background=true needs store=true", param="store")
    if fields.background and fields.stream:
        raise BadRequest(
            "got background=true with stream=true; want one of them: ask again for what runs in"
            " the background",
            param="stream",
        )
    turn = Turn(fields, request, shelf)
    tenant = tenant_of(request)
    if fields.previous_response_id is not None:
        if fields.conversation is not None:
            text = "got both previous_response_id and conversation; want one of them"
            raise BadRequest(text, param="conversation")
        chain = await _chain(shelf, tenant, fields.previous_response_id)
        turn.chain_ids = [record.id for record in chain]
        turn.history = [item for record in chain for item in said_in(record)]
    elif fields.conversation is not None:
        turn.conversation_id = _conversation_id(fields.conversation)
        await found_conversation(shelf, tenant, turn.conversation_id)
        turn.history = await shelf.conversations.items(tenant, turn.conversation_id)
    await _resolve_references(fields, shelf, tenant, turn.history)
    return turn


def said_in(record: Record) -> list[StoredItem]:
    """What a response adds to a conversation: its input and its output."""
    return [*json.loads(record.asked), *json.loads(record.body)["output"]]


def _refuse_stored(fields: ResponsesFields, request: HttpRequest) -> None:
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(fields, name):
            raise BadRequest(
                f"got {name}, but nothing is stored here (the server runs with --no-store);"
                " send the whole conversation as input",
                param=name,
            )
    if fields.store:
        request.warnings.append("store=true: nothing is stored here (--no-store)")


async def _chain(shelf: Shelf, tenant: str, id: str) -> list[Record]:
    param = "previous_response_id"
    chain = await shelf.records.chain(tenant, id)
    if not chain:
        raise Problem(404, f"no such response: {id[:80]!r}", param=param, code="not_found")
    oldest, newest = chain[0], chain[-1]
    if newest.status in OPEN:
        text = f"the response {newest.id} is {newest.status}; wait until it is done"
        raise Problem(409, text, param=param, code="conflict")
    if oldest.previous_id is not None:
        raise BadRequest(
            f"the response {newest.id} goes on from {oldest.previous_id}, which was deleted;"
            " send the whole conversation as input",
            param=param,
        )
    conversation = json.loads(newest.body).get("conversation")
    if conversation is not None:
        raise BadRequest(
            f"the response {newest.id} is part of {conversation['id']};"
            f" go on with conversation={conversation['id']!r}",
            param=param,
        )
    return chain


def _conversation_id(given: str | dict[str, Any]) -> str:
    found = given.get("id") if isinstance(given, dict) else given
    if not isinstance(found, str):
        raise BadRequest("got a conversation without an id", param="conversation")
    return found


async def found_conversation(shelf: Shelf, tenant: str, id: str) -> Record:
    found = await shelf.records.get(tenant, id, CONVERSATION)
    if found is None:
        text = f"no such conversation: {id[:80]!r}"
        raise Problem(404, text, param="conversation", code="not_found")
    return found


async def _resolve_references(
    fields: ResponsesFields, shelf: Shelf, tenant: str, history: list[StoredItem]
) -> None:
    """Put the items themselves where the input only names them."""
    if isinstance(fields.input, str):
        return
    known = {item["id"]: item for item in history}
    for i, item in enumerate(fields.input):
        if item.get("type") != "item_reference":
            continue
        id = str(item.get("id"))
        if id not in known and (response_id := response_id_of(id)) is not None:
            record = await shelf.records.get(tenant, response_id, RESPONSE)
            known |= {one["id"]: one for one in said_in(record)} if record is not None else {}
        if id not in known:
            text = f"no such item: {id[:80]!r}"
            raise Problem(404, text, param=f"input[{i}].id", code="not_found")
        fields.input[i] = known[id]
