"""Measurements that `fxoverlap bench` runs: whole steps, eager and overlapped, in one interleaved run."""
