"""What ``bench_workers`` hands to ``mcp-sessions serve``: a layer over the store of its run."""

import os

from bench.bench_servers import STORE, noisy_layer

layer = noisy_layer(os.environ[STORE])
