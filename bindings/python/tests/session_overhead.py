"""Time of one call of ``InferenceSession.run`` on small models, against onnxruntime in the same process.

``python session_overhead.py`` prints the medians of interleaved rounds in microseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
DIGITS = HERE.parents[2] / "models/digits.onnx"
CALLS, ROUNDS = 300, 41
CASES: dict[str, tuple[Path, dict[str, Any]]] = {
    "digits, 1 image": (DIGITS, {"image": np.ones((1, 1, 8, 8), np.float32)}),
    "digits, 16 images": (DIGITS, {"image": np.ones((16, 1, 8, 8), np.float32)}),
    "one addition": (HERE / "models/denoted.onnx", {"x": np.ones((2, 3), np.float32)}),
    "one addition of 12 MB": (HERE / "models/denoted.onnx", {"x": np.ones((1_000_000, 3), np.float32)}),
    "strings": (
        HERE / "models/strings.onnx",
        {"words": np.array(["cat", "dog"]), "suffix": np.array(["!"])},
    ),
}


def session(module: Any, path: Path, threads: int) -> Any:
    options = module.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return module.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Measures and prints."""
    import halcyon.onnxruntime
    import onnxruntime  # type: ignore[import-untyped]

    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print(f"{threads} threads, medians in microseconds")
    print(f"{'':24} {'Halcyon':>10} {'onnxruntime':>12} {'ratio':>7}")
    for name, (path, feed) in CASES.items():
        calls = CALLS if sum(a.nbytes for a in feed.values()) < 1 << 20 else 3
        sessions = [session(m, path, threads) for m in (halcyon.onnxruntime, onnxruntime)]
        times: list[list[float]] = [[], []]
        for k in range(ROUNDS):
            for s, out in zip(sessions, times, strict=True):
                start = time.perf_counter()
                for _ in range(calls):
                    s.run(None, feed)
                if k:
                    out.append((time.perf_counter() - start) / calls * 1e6)
        ours, theirs = map(statistics.median, times)
        print(f"{name:24} {ours:10.1f} {theirs:12.1f} {theirs / ours:7.2f}")


if __name__ == "__main__":
    main()
