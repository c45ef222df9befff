"""The protobuf messages of the protocol (specification section 3), and how they become bytes and back.

Every message and enum of ``curvfs/wire/pb/curvine.proto`` can be imported from here by its name in the specification;
``pb`` is the generated module itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass

from curvfs.errors import LocalProtocolError, RemoteProtocolError
from curvfs.wire.pb import curvine_pb2
from curvfs.wire.pb.curvine_pb2 import *  # noqa: F403

#: The generated module, for those who write ``pb.MkdirRequest``.
pb = curvine_pb2

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """The bytes of ``message``, as the servers would write them.

    Fields that the protocol requires and that are unset get their declared default first, in ``message`` itself and
    in every message inside it; then all fields are written in ascending order, map entries sorted by key.

    Source: section 3.1. Raises :class:`LocalProtocolError` for a message of 2 GiB or more.
    """
    _fill(message, _plan_of(type(message)))
    try:
        return message.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise LocalProtocolError(
            f"A {message.DESCRIPTOR.name} cannot be encoded; it must stay below 2 GiB: {error}"
        ) from error


def decode(cls: type[M], data: bytes | bytearray | memoryview) -> M:
    """The ``cls`` message in ``data``; no bytes at all are the message with every field at its default.

    Missing fields read as their declared default, unknown fields are kept but ignored, unknown enum values stay
    numbers. Raises :class:`RemoteProtocolError` when ``data`` is not such a message.

    Source: section 3.1.
    """
    try:
        return cls.FromString(bytes(data))
    except DecodeError as error:
        raise RemoteProtocolError(
            f"The peer sent {len(data)} bytes that are not a {cls.DESCRIPTOR.name}: {error}"
        ) from error


#: A protobuf FieldDescriptor (its type stubs and its implementations disagree on the class).
Field = Any


def map_value(field: Field) -> Field | None:
    """The value field of a map field; None when ``field`` is not a map."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return None
    return entry.fields_by_name["value"]


#: The schema's mark on fields that are always written.
_REQUIRED: Any = pb.required


@dataclass(frozen=True, slots=True)
class _Plan:
    """What :func:`_fill` has to do for one message type, worked out once from its descriptor."""

    #: Required fields that hold no message: name and declared default.
    scalars: tuple[tuple[str, Any], ...]
    #: Required messages: name and plan.
    required: tuple[tuple[str, _Plan], ...]
    #: Optional messages that have required fields inside.
    optional: tuple[tuple[str, _Plan], ...]
    #: Repeated messages that have required fields inside.
    repeated: tuple[tuple[str, _Plan], ...]
    #: Maps whose values have required fields inside.
    maps: tuple[tuple[str, _Plan], ...]
    #: The encoded message whose required fields all have their defaults.
    default: bytes

    @property
    def is_trivial(self) -> bool:
        return not (self.scalars or self.required or self.optional or self.repeated or self.maps)


_plans: dict[type[Message], _Plan] = {}


def _plan_of(cls: type[Message]) -> _Plan:
    plan = _plans.get(cls)
    if plan is None:
        plan = _plans[cls] = _make_plan(cls)
    return plan


def _make_plan(cls: type[Message]) -> _Plan:
    template = cls()
    scalars: list[tuple[str, Any]] = []
    required: list[tuple[str, _Plan]] = []
    optional: list[tuple[str, _Plan]] = []
    repeated: list[tuple[str, _Plan]] = []
    maps: list[tuple[str, _Plan]] = []
    for field in cls.DESCRIPTOR.fields:
        value = map_value(field)
        is_required = bool(field.GetOptions().Extensions[_REQUIRED])
        group = maps if value else repeated if field.is_repeated else optional
        inner: Any = (value or field).message_type
        if inner is not None:
            plan = _plan_of(GetMessageClass(inner))
            if is_required:
                getattr(template, field.name).SetInParent()
                getattr(template, field.name).MergeFromString(plan.default)
                required.append((field.name, plan))
            elif not plan.is_trivial:
                group.append((field.name, plan))
        elif is_required:
            scalars.append((field.name, field.default_value))
            setattr(template, field.name, field.default_value)
    default = template.SerializeToString(deterministic=True)
    return _Plan(tuple(scalars), tuple(required), tuple(optional), tuple(repeated), tuple(maps), default)


def _fill(message: Message, plan: _Plan) -> None:
    has = message.HasField
    for name, default in plan.scalars:
        if not has(name):
            setattr(message, name, default)
    for name, inner in plan.required:
        if has(name):
            _fill(getattr(message, name), inner)
        else:
            child = getattr(message, name)
            child.SetInParent()
            child.MergeFromString(inner.default)
    for name, inner in plan.optional:
        if has(name):
            _fill(getattr(message, name), inner)
    for name, inner in plan.repeated:
        _fill_all(getattr(message, name), inner)
    for name, inner in plan.maps:
        _fill_all(getattr(message, name).values(), inner)


def _fill_all(messages: Iterable[Message], plan: _Plan) -> None:
    for message in messages:
        _fill(message, plan)
