"""Kernels that choose tokens: the selector's walk, acceptance."""

from __future__ import annotations
