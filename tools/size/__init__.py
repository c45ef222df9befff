"""``curvfs size``: what a model's KV cache needs, and what a pool gives; see docs/size.md."""
