"""The laboratory: plans and measures programs, and draws the documents' tables, from a checkout.

`python -m benchmarks ab | device | plan | draw`; a module with a table of its own, such as `caches`, is
measured by `python -m benchmarks.caches`.

A *job* is the computation: an entry of `jobs.JOBS`. A *way* runs it: a backend, or the port with its kernels
off. A *result* is the dictionary of one job in one way, with a "status": "ok", "wrong" (beyond the
tolerance), "failed" or "does not fit" (into memory).
"""
