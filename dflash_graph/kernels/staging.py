"""Kernels that move rows: embeddings, ids, rotary tables, hiddens, features, counts."""

from __future__ import annotations
