"""Ring attention over `cp`: the sequence is split, and keys and values go around a ring (Liu et al., 2310.01889).

Forward: n - 1 permutes of K and of V, B S / n D e bytes each, in every attention. The softmax is put together from the
parts. Backward, derived: as many permutes of their gradients, the other way around; K and V are kept, and not sent
again. Of 2 n pieces of the sequence rank r has the pieces r and 2 n - 1 - r, so that causal attention is as much work
for every rank (zigzag). The parameters are replicated: all_reduce of every gradient.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from contract.problem import Batch
from jax_impl.blocks import Local
from jax_impl.collectives import all_reduce, permute, varying
from jax_impl.online_softmax import attend_to, joined

AXIS = "cp"
REPLICATED = True  # so gradients that another axis scatters are summed afterwards, instead of by `weights`
BATCH_SPEC = Batch(*[P(None, AXIS)] * 3)  # a rank's two pieces of the sequence: X[B, S_cp, D], Y[B, S_cp, D]


def arranged(batch: Batch, n: int) -> Batch:
    """The global batch with the pieces of the sequence in the order in which the ranks have them."""

    def in_order(a: Any) -> Any:
        pieces = np.split(a, 2 * n, axis=1)
        return np.concatenate([pieces[i] for rank in range(n) for i in (rank, 2 * n - 1 - rank)], axis=1)

    return Batch(*map(in_order, batch))


def weights(layer: Any) -> Any:
    """Every rank has W[D, F] whole. Backward, derived: dW[D, F] = AllReduce_cp(dW[D, F]{U_cp})."""
    return layer._make(varying(p, AXIS) for p in layer)


def attend(q: Array, k: Array, v: Array, local: Local) -> Array:
    """Q[B, S_cp, H, K] attends to the K and V[B, S_cp, H, K] of one rank after the other, without `local`."""
    rank, n = lax.axis_index(AXIS), lax.axis_size(AXIS)
    (early, late), (k0, k1), (v0, v1) = (jnp.split(a, 2, axis=1) for a in (q, k, v))
    first = attend_to(early, k0, v0, causal=True)
    second = joined(attend_to(late, k0, v0, causal=False), attend_to(late, k1, v1, causal=True))
    for turn in range(1, n):
        k, v = (permute(a, AXIS, [(source, (source + 1) % n) for source in range(n)]) for a in (k, v))
        (k0, k1), (v0, v1) = (jnp.split(a, 2, axis=1) for a in (k, v))
        second = joined(second, attend_to(late, k0, v0, causal=False))
        # Of an earlier rank, the early queries see the early keys; of a later rank, the late ones see the late keys.
        earlier = (rank - turn) % n < rank
        seen = (jnp.where(earlier, a, b) for a, b in ((early, late), (k0, k1), (v0, v1)))
        part = attend_to(*seen, causal=False)
        of_first, of_second = joined(first, part), joined(second, part)
        first = jnp.where(earlier, of_first[0], first[0]), jnp.where(earlier, of_first[1], first[1])
        second = jnp.where(earlier, second[0], of_second[0]), jnp.where(earlier, second[1], of_second[1])
    return jnp.concatenate((first[0], second[0]), axis=1).astype(q.dtype)


def total(share: Array) -> Array:
    """L = AllReduce_cp(L{U_cp})."""
    return all_reduce(share, AXIS)
