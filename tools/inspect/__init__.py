"""``curvfs inspect``: one object, one prompt's pages, or a whole pool; see docs/inspect.md."""
