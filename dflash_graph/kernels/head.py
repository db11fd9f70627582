"""Kernels of the output head: scores, the best id, the first k."""

from __future__ import annotations
