"""Is there a GPU that torch can use?"""

from __future__ import annotations


def why_none() -> str:
    """Why there is none; empty when there is one."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build without GPU support"
    return "" if torch.cuda.is_available() else "torch finds no GPU"
