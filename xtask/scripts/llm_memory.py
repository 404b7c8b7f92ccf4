"""Compares the memory that `halcyon fit` predicts with the measured peaks of `halcyon generate`.

    python llm_memory.py --halcyon target/release/halcyon --context 512 --context 8192 a.gguf b.gguf

Prints a row of a Markdown table for each model and context. Three figures are compared:

- device: bytes that the device has allocated (`peak.device` and `memory.device.peak`),
- anonymous: memory of the process that no file holds (`peak.anonymous`; measured every 2 ms by `generate`),
- resident: with the pages of mapped files (`peak.with_file_pages`; measured by the kernel, `VmHWM`, which
  is `ru_maxrss` of the child).

The prompt fills a step (--chunk tokens, or fewer if the context is shorter), and 8 tokens follow.
`fit` runs no kernels, so it misses their code and their scratch. Ends with code 1 if a figure is off by more
than --limit percent and by more than this: 1 MiB of anonymous and 5 MiB of resident memory.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile


# Bytes of the process that kernels add when they run.
KERNELS = {"device": 0, "anonymous": 1 << 20, "resident": 5 << 20}


def write_ids(path, count):
    ids = [i * 37 % 400 + 3 for i in range(count)]
    head = "{'descr': '<i8', 'fortran_order': False, 'shape': (%d,), }" % count
    head += " " * ((64 - (10 + len(head) + 1) % 64) % 64) + "\n"
    with open(path, "wb") as f:
        f.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode())
        f.write(struct.pack("<%dq" % count, *ids))


def run(command):
    """The JSON object that a command prints, and the peak of its resident memory in bytes."""
    env = {**os.environ, "HALCYON_CACHE": "off", "HALCYON_CONFIG": "off"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as p:
        out = p.stdout.read()
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode:
        sys.exit(f"{' '.join(command)} ended with code {p.returncode}")
    return json.loads(out), usage.ru_maxrss * 1024


def measure(a, model, context, backend):
    same = ["--backend", backend, "-c", str(context), "--chunk", str(a.chunk), "--json", *a.more]
    if backend == "cpu":
        same += ["--threads", str(a.threads)]
    fit, _ = run([a.halcyon, "fit", model, *same])
    with tempfile.TemporaryDirectory() as folder:
        ids = os.path.join(folder, "prompt.npy")
        write_ids(ids, max(1, min(a.chunk, context - 8)))
        ran, peak = run([a.halcyon, "generate", model, "--prompt-tokens", ids, "-n", "8", "--ignore-eos", *same])
    memory = ran["memory"]
    pairs = {
        "device": (fit["peak"]["device"], memory["device"]["peak"]),
        "anonymous": (fit["peak"]["anonymous"], memory["peak_anonymous"]),
        "resident": (fit["peak"]["with_file_pages"], peak),
    }
    cells, worst = [os.path.basename(model.rstrip("/")), str(context), backend], 0.0
    for name, (predicted, measured) in pairs.items():
        off = 100.0 * (predicted - measured) / measured
        if abs(predicted - measured) > KERNELS[name]:
            worst = max(worst, abs(off))
        cells.append(f"{predicted / 2**20:.1f} / {measured / 2**20:.1f} ({off:+.1f} %)")
    print("| " + " | ".join(cells) + " |", flush=True)
    if a.verbose:
        print(json.dumps({"fit": fit, "memory": memory}), file=sys.stderr)
    return worst


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="+")
    p.add_argument("--halcyon", default="target/release/halcyon")
    p.add_argument("--context", type=int, action="append", help="repeatable; default: 512 and 8192")
    p.add_argument("--backend", action="append", help="repeatable; default: cpu")
    p.add_argument("--threads", type=int, default=2, help="of the CPU")
    p.add_argument("--chunk", type=int, default=512, help="tokens of the prompt; devices that are emulated are slow")
    p.add_argument("--limit", type=float, default=5.0, help="percent")
    p.add_argument("--more", action="append", default=[], help="further option of both commands; repeatable")
    p.add_argument("--verbose", action="store_true", help="prints the reports of both commands to stderr")
    a = p.parse_args()
    print("| model | context | backend | device, MiB | anonymous, MiB | resident, MiB |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for model in a.models:
        for context in a.context or [512, 8192]:
            for backend in a.backend or ["cpu"]:
                worst = max(worst, measure(a, model, context, backend))
    print(f"largest difference that counts: {worst:.1f} %")
    sys.exit(worst > a.limit)


if __name__ == "__main__":
    main()
