"""Measurements: `ab` compares backends, `device` measures a device; `worker` runs each in its own process.

A *job* is the computation: an entry of `ladder.JOBS`, or for `ab` a direction. A *way* runs it: a backend, or
the port with its kernels off. A *result* is the dictionary of one job in one way, with a "status": "ok",
"wrong" (beyond the tolerance), "failed" or "does not fit" (into memory).
"""
