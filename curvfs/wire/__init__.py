"""The Curvine wire protocol, sans-io: bytes in, frames and messages out, and back.

* :mod:`~curvfs.wire.frame`: the 22-byte frame head, whole frames, the incremental decoder
* :mod:`~curvfs.wire.codes`: RPC codes, statuses, and which message the header of a frame holds
* :mod:`~curvfs.wire.messages`: the protobuf messages, their encoding and decoding
* :mod:`~curvfs.wire.records`: the error record in the data section of an error reply
* :mod:`~curvfs.wire.session`: who may send what when, for both roles
* :mod:`~curvfs.wire.describe`: a frame as a JSON-ready dictionary

Nothing here opens a socket, reads a clock or waits.
"""
