"""The dp x tp mesh: `placement` says which axis lies where, `report` reads off a compiled program what
became of it, `processes` is for a mesh over several of them."""

from cogvideox_torchax.sharding.mesh import check_mesh, make_mesh
from cogvideox_torchax.sharding.placement import (
    HWNTC,
    NCTHW,
    NTHWC,
    PaddedChunk,
    Placement,
    spread,
)
from cogvideox_torchax.sharding.processes import (
    PATIENCE,
    Exchange,
    ProcessError,
    abandon,
    check_all_take_part,
    connect,
    exchanging,
    is_first,
    wait_for_all,
)
from cogvideox_torchax.sharding.programs import ShardedProgram
from cogvideox_torchax.sharding.report import (
    Report,
    Row,
    layers,
    report,
    report_network,
    table,
)

__all__ = [
    "HWNTC",
    "NCTHW",
    "NTHWC",
    "PATIENCE",
    "Exchange",
    "PaddedChunk",
    "Placement",
    "ProcessError",
    "Report",
    "Row",
    "ShardedProgram",
    "abandon",
    "check_all_take_part",
    "check_mesh",
    "connect",
    "exchanging",
    "is_first",
    "layers",
    "make_mesh",
    "report",
    "report_network",
    "spread",
    "table",
    "wait_for_all",
]
