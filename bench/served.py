"""A layer over the store of a run, which ``bench_workers`` serves with ``mcp-sessions serve``."""

import os

from bench.bench_servers import STORE, noisy_layer

layer = noisy_layer(os.environ[STORE])
