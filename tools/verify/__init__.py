"""``curvfs verify``: a seeded pattern, written and read back by other ways; see docs/verify.md."""
