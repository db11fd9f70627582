"""Kernels: which template implements an op, and the specialised case of a call.

`registry` holds the rules, the other modules one family of ops each, `catalog` what whole graphs
need.
"""

from dflash_graph.choices import Choice
from dflash_graph.kernels import (
    attention,
    head,
    products,
    recurrence,
    rows,
    sampling,
    selector,
    staging,
)
from dflash_graph.kernels.catalog import (
    cases_of,
    kernel_cases,
    node_case,
    required_case,
    shipped_cases,
)
from dflash_graph.kernels.registry import (
    ROW_BUCKETS,
    Kernel,
    KernelCase,
    completed_choice,
    default_choice,
    device_choice,
    kernel_case,
    kernel_ops,
    row_bucket,
    row_tile,
)

__all__ = [
    "ROW_BUCKETS",
    "Choice",
    "Kernel",
    "KernelCase",
    "attention",
    "cases_of",
    "completed_choice",
    "default_choice",
    "device_choice",
    "head",
    "kernel_case",
    "kernel_cases",
    "kernel_ops",
    "node_case",
    "products",
    "recurrence",
    "required_case",
    "row_bucket",
    "row_tile",
    "rows",
    "sampling",
    "selector",
    "shipped_cases",
    "staging",
]
