"""``curvfs bench``: fio's job files against a directory, the native client and the KV store; see docs/bench.md."""
