"""Health: what a place can deliver at this moment, and what is not worth asking it for."""
