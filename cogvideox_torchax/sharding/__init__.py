"""The dp x tp mesh: `placement` says which axis lies where, `report` reads off a compiled program what
became of it."""

from cogvideox_torchax.sharding.placement import Padded, Placement, ShardedProgram, check_mesh, make_mesh
from cogvideox_torchax.sharding.report import (
    Report,
    Row,
    compile_chunk,
    instructions,
    report,
    report_network,
)

__all__ = [
    "Padded",
    "Placement",
    "Report",
    "Row",
    "ShardedProgram",
    "check_mesh",
    "compile_chunk",
    "instructions",
    "make_mesh",
    "report",
    "report_network",
]
