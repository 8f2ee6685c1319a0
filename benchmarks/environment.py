"""The environment of a benchmark: one thread, no network and, with --isa, fewer instruction sets."""

from __future__ import annotations

import argparse
import os

ISAS = {  # what --isa sets: each library reads its own variable when it is loaded
    "avx2": {
        "ALLMASK_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2", "CT2_FORCE_CPU_ISA": "AVX2",
    },
}  # fmt: skip
PARSER = argparse.ArgumentParser(add_help=False)
PARSER.add_argument("--isa", choices=ISAS, help="compute as on a processor that has no more than this")
ISA = PARSER.parse_known_args()[0].isa
os.environ.update(ISAS.get(ISA, {}))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
