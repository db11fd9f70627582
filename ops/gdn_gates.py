"""gdn_gates: write strength and log decay of every value head of a GDN layer.

Math:     beta = sigmoid(b);  g = -exp(a_log) * softplus(a + dt_bias);  [b | a] = ba
Shapes:   ba [B, W, 2*value_heads]; a_log, dt_bias [value_heads] float32;
          beta, g [B, W, value_heads] float32
Numeric:  float64, rounded once to float32; row-invariant
Effects:  writes all of beta and g
Source:   spec "The target" (Gated DeltaNet)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.arithmetic import accumulator, sigmoid, softplus
from dflash_graph.op import Op, tensor, weight


def reference(
    ba: Tensor, a_log: Tensor, dt_bias: Tensor, *, value_heads: int
) -> tuple[Tensor, Tensor]:
    b, a = ba.double().split(value_heads, dim=-1)
    dtype = accumulator(ba)
    g = -torch.exp(a_log.double()) * softplus(a + dt_bias.double())
    return sigmoid(b).to(dtype), g.to(dtype)


OP = Op(
    name="gdn_gates",
    inputs={
        "ba": tensor("B W 2*value_heads"),
        "a_log": weight("value_heads", "float32"),
        "dt_bias": weight("value_heads", "float32"),
    },
    outputs={
        "beta": tensor("B W value_heads", "float32"),
        "g": tensor("B W value_heads", "float32"),
    },
    attributes={"value_heads": int},
    reference=reference,
    # beta: exp, sum, quotient; g: bias, softplus (exp, sum, log), product; exp(a_log) once per head
    flops=lambda n: n.B * n.W * n.value_heads * 8 + n.value_heads,
)
