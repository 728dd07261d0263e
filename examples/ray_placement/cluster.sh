#!/bin/sh
# A Ray cluster of two nodes with a GPU each, and a server whose model runs on both. Here both nodes
# are this machine, and each only says that it has a GPU: enough to try it with `tiny` on a CPU. On
# two machines, run the first `ray start` and the server on one, the second on the other, without
# --num-gpus. It needs `pip install ./examples/ray_placement` and openssl. Ctrl-C ends the server, and
# then all Ray nodes of this machine. Without the token every machine that reaches Ray's ports could
# run code here: the second machine needs the same one.
set -eu

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(openssl rand -hex 32)}"

ray start --head --port 6379 --num-gpus 1 --include-dashboard false --disable-usage-stats
trap 'ray stop' EXIT INT TERM
ray start --address 127.0.0.1:6379 --num-gpus 1 --disable-usage-stats

antiphon serve --model tiny --device cpu --record recordings --placement ray:127.0.0.1:6379 --workers-wanted 2
