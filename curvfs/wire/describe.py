"""A frame as a dictionary that JSON can carry: what ``curvfs wire decode`` prints."""

from __future__ import annotations

import base64
import math
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from curvfs.errors import RemoteProtocolError
from curvfs.wire.codes import ResponseStatus, RpcCode, message_types
from curvfs.wire.frame import Frame, FrameHead
from curvfs.wire.messages import Field, decode, map_value
from curvfs.wire.records import decode_error

Buffer = bytes | bytearray | memoryview

#: Enum values of our schema that the protocol does not have (an open enum needs a zero).
_STAND_IN = "_UNSPECIFIED"


def describe(
    frame: Frame | FrameHead, header: Buffer = b"", data: Buffer | None = None, data_len: int | None = None
) -> dict[str, Any]:
    """Everything in a frame but its payload, JSON-ready.

    Either a whole :class:`Frame`, or a head with its ``header`` and, where it is at hand, its ``data``; ``data_len``
    defaults to what the head says.

    Always there: ``code``, ``name``, ``request_status``, ``response_status``, ``req_id``, ``seq_id``, ``message`` (the
    type in the header, None where there is none), ``fields`` (those on the wire, under their specification names;
    enums by name, or the number where it has none; bytes as base64; infinite doubles and NaN as strings) and
    ``data_len``. Error replies add ``error_kind`` and ``error_text`` (None when ``data`` is not at hand). A header that
    is not the message it should be makes ``fields`` None and adds ``header_error``; fields that our schema does not
    know add ``unknown_fields``, their numbers.
    """
    if isinstance(frame, Frame):
        head, header, data = frame.head, frame.header, frame.data
    else:
        head = frame
    cls = message_types(head)
    described: dict[str, Any] = {
        "code": head.code,
        "name": RpcCode.of(head.code).wire_name,
        "request_status": head.request.wire_name,
        "response_status": head.response.wire_name,
        "req_id": head.req_id,
        "seq_id": head.seq_id,
        "message": cls.DESCRIPTOR.name if cls else None,
        "fields": {},
        "data_len": head.data_len if data_len is None else data_len,
    }
    if cls is not None:
        try:
            message = decode(cls, header)
        except RemoteProtocolError as error:
            described |= {"fields": None, "header_error": str(error)}
        else:
            described["fields"] = _fields(message)
            if unknown := unknown_fields(message):
                described["unknown_fields"] = unknown
    if head.response is ResponseStatus.ERROR:
        kind, text = (None, None) if data is None else decode_error(data)
        described |= {"error_kind": kind, "error_text": text}
    return described


def unknown_fields(message: Message) -> list[int]:
    """The numbers of the fields of ``message`` itself (not of messages inside it) that our schema does not know."""
    fields: Any = UnknownFieldSet(message)
    return sorted({field.field_number for field in fields})


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: Field, value: Any) -> Any:
    entry_value = map_value(field)
    if entry_value is not None:
        return {str(key): _scalar(entry_value, item) for key, item in sorted(value.items())}
    if field.is_repeated:
        return [_scalar(field, item) for item in value]
    return _scalar(field, value)


def _scalar(field: Field, value: Any) -> Any:
    if field.message_type is not None:
        return _fields(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None or known.name.endswith(_STAND_IN) else known.name
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
