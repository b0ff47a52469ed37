"""refdist: a pure-NumPy reference emulator of distributed training. Public names, nothing else."""

from refdist import numerics
from refdist.comm import Comm, Mesh, run
from refdist.device import Device
from refdist.errors import ConfigError, DeadlockError, MismatchError, OutOfDeviceMemory, PeerFailed, PlanError
from refdist.model import ModelConfig, init_params, load_params, reference, save_params
from refdist.optim import SGD, AdamW
from refdist.parallel import Plan, loss_and_grads
from refdist.train import Trainer

__all__ = ["SGD", "AdamW", "Comm", "ConfigError", "DeadlockError", "Device", "Mesh", "MismatchError", "ModelConfig",
           "OutOfDeviceMemory", "PeerFailed", "Plan", "PlanError", "Trainer", "init_params", "load_params",
           "loss_and_grads", "mpi_world", "numerics", "reference", "run", "save_params"]


def mpi_world() -> Comm:
    """The group of all ranks that ``mpirun`` started; see :func:`refdist.comm.mpi.mpi_world`."""
    from refdist.comm.mpi import mpi_world as world  # here, so that everything else works without an MPI library

    return world()
