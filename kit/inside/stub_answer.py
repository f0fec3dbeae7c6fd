"""The stub's side of one request: its answer, sent on a schedule, and the faults planted in it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from .stub_engine import Service
from .stub_frames import Frames, usage_of
from .stub_wire import Wire, chunked, json_answer

if TYPE_CHECKING:
    from .stub import Stub


class Answer:
    """One generation, sent on an absolute schedule from the request's arrival."""

    def __init__(
        self,
        stub: Stub,
        wire: Wire,
        number: int,
        service: Service,
        body: dict[str, Any],
        is_chat: bool,
    ) -> None:
        self.number = number
        self.service = service
        self.request_id = ""
        self.arrived_ns = 0
        self.sent_ns: list[int] = []
        self.ended = False
        self._stub = stub
        self._wire = wire
        self._body = body
        self._streamed = body.get("stream") is True
        options = body.get("stream_options")
        self._wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._is_chat = is_chat
        self._base_ns = 0
        self._next = 0
        self._fetching: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The id that the client gave, else the number: by it answer and log are one request's."""
        return self.request_id or str(self.number)

    def start(self, base_ns: int) -> None:
        """Begin to serve: the schedule counts from `base_ns`."""
        stub, service = self._stub, self.service
        stub.engine.start(self.number, service)
        self._base_ns = base_ns
        if service.fault == "fail":
            stub.alarm.at(base_ns + service.offsets_ns[0], self._refuse)
        elif service.fault == "stuck":
            return  # in flight until the client gives up
        else:
            if self._streamed:
                self._begin_stream()
            if service.external_tokens and service.fault != "die":
                self._fetching = stub.loop.create_task(self._fetch())
            else:
                self._generate()

    def _begin_stream(self) -> None:
        first = self._wire.event_stream_head()
        if self._is_chat and self._stub.config.role_only_first:
            first += chunked(self._frames().event("", None, role="assistant"))
        self._wire.send(first)

    async def _fetch(self) -> None:
        """Fetch the prompt's blocks, then generate; a stream has begun meanwhile."""
        how = await self._stub.channel.fetch(self._body["kv_transfer_params"])
        self.service = self._stub.engine.fetched(self.service, how)
        self._base_ns = self._stub.now_ns()
        if self.service.fault == "load":
            self._break_off()
        else:
            self._generate()

    def _generate(self) -> None:
        offsets = self.service.offsets_ns
        if self._streamed:
            self._stub.alarm.at(self._base_ns + offsets[0], self._emit)
        else:
            self._stub.alarm.at(self._base_ns + offsets[-1], self._answer_whole)

    def _break_off(self) -> None:
        """Answer what vLLM does where a prompt's blocks could not be loaded."""
        told = {"message": "Internal server error", "type": "InternalServerError", "param": None}
        refusal = {"error": {**told, "code": 500}}
        if self._streamed:
            event = b"data: " + json.dumps(refusal).encode() + b"\n\n"
            self._wire.send_last(chunked(event) + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            self._wire.send_last(json_answer(500, refusal))
        self._end("error")

    def _emit(self) -> None:
        if self.ended or self._planted():
            return
        index, service = self._next, self.service
        last = index + 1 == len(service.texts)
        reason = service.finish_reason if last else None
        data = chunked(self._frames().event(service.texts[index], reason))
        self.sent_ns.append(self._stub.now_ns())
        self._wire.send(data)
        self._next += 1
        if not last:
            self._stub.alarm.at(self._base_ns + service.offsets_ns[self._next], self._emit)
            return
        tail = b""
        if self._wants_usage:
            tail = chunked(self._frames().event("", None, usage=usage_of(service)))
        self._wire.send_last(tail + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        self._end(service.finish_reason)

    def _planted(self) -> bool:
        """Act out a fault of this request or of the server when its moment has come."""
        fault, sent = self.service.fault, self._next
        self._die_as_planned()
        if self._stub.engine_is_dead:
            self._wire.close()
        elif fault == "reset" and sent == 1:
            self._wire.reset()
        elif fault == "early_eof" and sent == (len(self.service.texts) + 1) // 2:
            self._wire.close()
        elif fault == "bad_json" and sent == 1:
            self._wire.send_last(chunked(b'data: {"choices": [\n\n') + b"0\r\n\r\n")
        else:
            # A hung answer stays in flight until the client gives up.
            return fault == "hang" and sent == 1
        self._end("abort")
        return True

    def _die_as_planned(self) -> None:
        planned = self._stub.config.die_after_requests
        if self.service.fault == "die" or (planned is not None and self.number + 1 >= planned):
            self._stub.die()

    def _refuse(self) -> None:
        if self.ended:
            return
        code = self._stub.config.fail_status
        refusal = {
            "error": {"message": "planted failure", "type": "InternalServerError", "code": code}
        }
        self._wire.send_last(json_answer(code, refusal))
        self._end("error")

    def _answer_whole(self) -> None:
        if self.ended:
            return
        self._die_as_planned()
        if self._stub.engine_is_dead:
            self._refuse()
            return
        service, transfer = self.service, self._stub.engine.transfer
        params = transfer.handed_over(
            self._body, service.prompt_tokens, self.request_id, service.finish_reason
        )
        frame = self._frames().whole(service, params, has_params=transfer.role is not None)
        data = json_answer(200, frame)
        self.sent_ns.append(self._stub.now_ns())
        if service.fault == "hang":
            return
        if service.fault in ("reset", "early_eof"):
            self._wire.send(data[: len(data) // 2])
            (self._wire.reset if service.fault == "reset" else self._wire.close)()
            self._end("abort")
            return
        self._wire.send_last(data if service.fault is None else json_answer(200, '{"choices": ['))
        self._end(service.finish_reason)

    def _frames(self) -> Frames:
        return Frames(self.name, self._stub.config.model, self._is_chat)

    def abort(self) -> None:
        """The client has gone."""
        if not self.ended:
            self._end("abort")

    def _end(self, reason: str) -> None:
        self.ended = True
        if self._fetching is not None:
            self._fetching.cancel()
        self._stub.on_ended(self, reason)
