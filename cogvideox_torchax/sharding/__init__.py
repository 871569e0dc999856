"""The dp x tp mesh: `mesh` has the devices of a program, `processes` serves a mesh of several processes."""

from cogvideox_torchax.sharding.mesh import (
    BatchPlacement,
    MeshPlace,
    Parallel,
    check_mesh,
    make_mesh,
    spread,
)
from cogvideox_torchax.sharding.processes import (
    TIMEOUT,
    ProcessError,
    check_all_take_part,
    check_one_slice,
    check_same,
    connect,
    exit_at_once,
    is_first,
    of_several_processes,
    wait_for_all,
)

__all__ = [
    "TIMEOUT",
    "BatchPlacement",
    "MeshPlace",
    "Parallel",
    "ProcessError",
    "check_all_take_part",
    "check_mesh",
    "check_one_slice",
    "check_same",
    "connect",
    "exit_at_once",
    "is_first",
    "make_mesh",
    "of_several_processes",
    "spread",
    "wait_for_all",
]
