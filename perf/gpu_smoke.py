"""The main job on whatever GPU is there, and replay against decode on it: ``python perf/gpu_smoke.py``.

Under three minutes. Needs a CUDA device and the demo target; everything else is bundled. Exit code 1 where replay and
decode disagree without a tie.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import torch


def main() -> int:
    """Run both parts and print how long they took."""
    if not torch.cuda.is_available():
        print("no CUDA device here")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            ["-m", "specbench", "run", "--device", "cuda", "--limit", "20", "--out", f"{folder}/run"],
            # float32: in bfloat16 near-ties are common, and each would need a look
            ["-m", "specbench", "agree", "--limit", "8", "--device", "cuda", "--dtype", "float32"],
        ]
        for step in steps:
            begun = time.perf_counter()
            code = subprocess.run([sys.executable, *step], check=False).returncode
            print(f"{' '.join(step[1:3])}: {time.perf_counter() - begun:.0f} s, exit code {code}")
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
