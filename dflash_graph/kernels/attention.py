"""Kernels of attention, and of what stores keys and values."""

from __future__ import annotations
