"""Tests of `runtime.link` and `runtime.worker`: pairs of a gateway and a worker."""
