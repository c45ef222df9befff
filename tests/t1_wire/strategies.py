"""Hypothesis strategies for frames and messages."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import settings
from hypothesis import strategies as st

from curvfs.wire.codes import RequestStatus, ResponseStatus
from curvfs.wire.frame import Frame
from curvfs.wire.messages import map_value, pb

#: For every test here: a busy machine may take its time over one example.
unhurried = settings(deadline=None)

MESSAGES: list[type[Message]] = [
    GetMessageClass(descriptor) for _, descriptor in sorted(pb.DESCRIPTOR.message_types_by_name.items())
]

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: I32,
    FieldDescriptor.TYPE_INT64: I64,
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_STRING: TEXT,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
    # Numbers without a name too: newer peers may send them.
    FieldDescriptor.TYPE_ENUM: st.one_of(st.integers(0, 10), I32),
}

frames = st.builds(
    Frame.make,
    st.integers(-128, 127),
    st.sampled_from([status for status in RequestStatus if status is not RequestStatus.UNDEFINED]),
    st.sampled_from(ResponseStatus),
    I64,
    I32,
    st.binary(max_size=60),
    st.binary(max_size=60),
)


@st.composite
def messages(draw: st.DrawFn, cls: type[Message]) -> Message:
    """A ``cls`` with any of its fields set, and any of the fields inside."""
    message = cls()
    for field in cls.DESCRIPTOR.fields:
        if draw(st.booleans()):
            _set(draw, message, field)
    return message


def _set(draw: st.DrawFn, message: Message, field: Any) -> None:
    entry_value = map_value(field)
    target = getattr(message, field.name)
    if entry_value is not None:
        for key in draw(st.lists(TEXT, max_size=3, unique=True)):
            if entry_value.message_type is not None:
                target[key].CopyFrom(draw(messages(GetMessageClass(entry_value.message_type))))
            else:
                target[key] = draw(_SCALARS[entry_value.type])
    elif field.message_type is not None:
        inner = messages(GetMessageClass(field.message_type))
        if field.is_repeated:
            target.extend(draw(st.lists(inner, max_size=2)))
        else:
            target.CopyFrom(draw(inner))
    elif field.is_repeated:
        target.extend(draw(st.lists(_SCALARS[field.type], max_size=3)))
    else:
        setattr(message, field.name, draw(_SCALARS[field.type]))
