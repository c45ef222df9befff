"""``curvfs top`` and ``curvfs stats``: what the mounts, stores and servers of this machine do; see docs/top.md."""
