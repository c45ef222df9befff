"""A client of a running ``lmcache server``: ``python server_client.py cold|warm URL HTTP_URL``.

``cold`` stores the pages of a fixed request, ``warm`` empties its own memory and fetches them. Both print how many
chunks were found before and the checksums of the pages, which LMCache's own benchmark client makes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

os.environ["LMCACHE_TRACK_USAGE"] = "false"

from lmcache.cli.commands.bench.server_bench.cases.baseline import BaselineBenchCase
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.command import add_server_arguments
from lmcache.cli.commands.bench.server_bench.config import parse_args_to_config


def main() -> None:
    kind, url, http_url = sys.argv[1:]
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    options = ["--rpc-url", url, "--url", http_url, "--mode", "cpu", "--transfer-mode", "engine_driven"]
    config = parse_args_to_config(parser.parse_args([*options, "--num-tokens", "512"]))
    client = ServerBenchClient(config, lambda line: print(line, file=sys.stderr))
    try:
        client.start()
        outcome = BaselineBenchCase._execute_request(client, 0, kind)
    finally:
        client.close()
    assert outcome is not None
    print(json.dumps({"found": outcome.lookup.hit_chunks, "checksums": outcome.checksums}), flush=True)


if __name__ == "__main__":
    main()
