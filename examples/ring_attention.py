"""Your own ring attention in the place of refdist's: a room is a module, or any object, with a class `Attention`.

    mpirun -n 3 python examples/ring_attention.py
    python examples/ring_attention.py                four ranks in this process

This one is written for reading: one head at a time, whole blocks, blocking sends, and no backward of its own: it goes round with
queries instead (each rank's q, dout, out and lse travel, K and V stay at home), which the interface does not mind. The gradients
of a whole model that uses it are then held against the single device's.
"""

import os
from types import SimpleNamespace

import numpy as np

import refdist as rd
from refdist import ops
from refdist.cli.launch import launched
from refdist.model.seams import AttentionSaved


class Attention:
    """What `refdist.model.seams.SequenceAttention` asks for."""

    def __init__(self, comm, device, chunks):
        self.comm, self.chunks = comm, chunks

    def shift(self, *arrays):
        """Send arrays to the right, receive those of the left."""
        right, left = (self.comm.rank + 1) % self.comm.size, (self.comm.rank - 1) % self.comm.size
        return [self.comm.sendrecv(np.ascontiguousarray(array), right, left) for array in arrays]

    def forward(self, q, k, v, dropout=None):
        rank, size = self.comm.rank, self.comm.size
        out, lse = np.zeros_like(q), np.full_like(q[..., 0], -np.inf)
        k_here, v_here = k, v
        for step in range(size):
            ops.merge_attention(out, lse, *ops.attention(q, k_here, v_here, self.chunks.mask(rank, (rank - step) % size)))
            k_here, v_here = self.shift(k_here, v_here)
        return out, AttentionSaved(q, k, v, out, lse)

    def again(self, saved, dropout=None):
        return self.forward(saved.q, saved.k, saved.v)

    def backward(self, dout, saved, dropout=None):
        rank, size = self.comm.rank, self.comm.size
        dk, dv = np.zeros_like(saved.k), np.zeros_like(saved.v)
        travelling = [dout, saved.q, saved.out, saved.lse, np.zeros_like(saved.q)]
        for step in range(size):
            dout, q, out, lse, dq = travelling
            mask = self.chunks.mask((rank - step) % size, rank)
            terms = ops.attention_backward(dout, q, saved.k, saved.v, out, lse, mask)
            for total, term in zip((dq, dk, dv), terms, strict=True):
                total += term
            travelling = self.shift(dout, q, out, lse, dq)
        return travelling[4], dk, dv  # after a whole turn dq is home


def program(comm: rd.Comm) -> None:
    """The model's gradients with this ring, against those of one device."""
    config = rd.ModelConfig(vocab_size=40, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=6)
    params = rd.init_params(config, dtype=np.float64)
    ids = np.random.default_rng(0).integers(0, 40, (2, 17))
    loss, grads = rd.reference.loss_and_grads(config, params, ids, ids)
    mine = {"ring": SimpleNamespace(Attention=Attention)}
    got_loss, got = rd.loss_and_grads(config, rd.Plan(cp=comm.size), params, ids, ids, comm=comm, implementations=mine)
    assert abs(got_loss - loss) < 1e-12
    for name in grads:
        np.testing.assert_allclose(got[name], grads[name], rtol=1e-9, atol=1e-12)
    if comm.rank == 0:
        print(f"{comm.size} ranks with their own ring: loss {got_loss:.6f} and {len(got)} gradients equal the single device's")


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        rd.run(program, ranks=4)
