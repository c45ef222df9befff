"""Generate ``curvine_pb2.py`` and its type stub from ``curvine.proto``: ``python -m curvfs.wire.pb.generate``.

Needs ``grpcio-tools`` 1.73 or 1.74, which carries the protoc of the protobuf 6.31 line. Code made by that protoc
imports under every protobuf runtime from 6.31.1 on, 7.x included; a newer protoc would raise the floor.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

PROTO = "curvfs/wire/pb/curvine.proto"


def main() -> int:
    """Run protoc on the schema, in place. Returns protoc's exit code."""
    try:
        from grpc_tools import protoc
    except ImportError:
        sys.exit("grpcio-tools is missing; install it: pip install 'grpcio-tools>=1.73,<1.75'")
    root = Path(__file__).parents[3]
    include = resources.files("grpc_tools") / "_proto"
    return int(
        protoc.main(
            [
                "protoc",
                f"--proto_path={root}",
                f"--proto_path={include}",
                f"--python_out={root}",
                f"--pyi_out={root}",
                PROTO,
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
