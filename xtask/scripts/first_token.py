"""Measures the time from the start of `halcyon generate` to the first byte of its answer.

`first_token.py MODEL HALCYON... [--rounds N] [OPTION...]` runs each program (for instance two versions) in turn, N
rounds after one that is not counted, and prints the median, the least and the most milliseconds. Further options
are those of `generate`. Other work on the machine disturbs the times: run it on an idle one.
"""

import argparse
import statistics
import subprocess
import time


def once(halcyon, model, options):
    command = [halcyon, "generate", model, "-p", "The capital of France is", "-n", "8", "--temp", "0", *options]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as p:
        first = p.stdout.read(1)
        took = time.perf_counter() - start
        p.stdout.read()
    if not first or p.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {p.returncode}")
    return 1000 * took


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("halcyon", nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    args, options = parser.parse_known_args()
    times = {h: [] for h in args.halcyon}
    for i in range(args.rounds + 1):
        for halcyon, own in times.items():
            took = once(halcyon, args.model, options)
            if i > 0:
                own.append(took)
    for halcyon, own in times.items():
        print(f"{halcyon}: median {statistics.median(own):.0f} ms ({min(own):.0f} to {max(own):.0f})")


if __name__ == "__main__":
    main()
