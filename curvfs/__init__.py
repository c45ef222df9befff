"""curvfs: a pure-Python client of Curvine and a small single-node server speaking the same protocol."""

__version__ = "0.1.0"
