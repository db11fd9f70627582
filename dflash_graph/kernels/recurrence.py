"""Kernels of Gated DeltaNet layers: a block's recurrence and its commit."""

from __future__ import annotations
