"""Compares the speed of language models with llama.cpp's, in turn.

`llm_speed.py HALCYON LLAMA_BENCH MODEL... [--rounds N] [--threads N] [-p N] [-n N] [-d N,...]` runs
`halcyon bench llm` and llama.cpp's llama-bench on each GGUF file in turn, N rounds, each with one measured
run, and prints for each test the median rates in tokens per second and the ratio of Halcyon's to llama.cpp's.
llama-bench must be built with native flags (`llama_install.py native`). Other work on the machine disturbs the
ratios: run it on an idle one.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from statistics import median


def halcyon(a, model, depth):
    command = [a.halcyon, "bench", "llm", model, "-p", str(a.prompt), "-n", str(a.generate), "-d", str(depth),
               "-r", "1", "--backend", "cpu", "--threads", str(a.threads), "--json"]
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {t["test"].split(" ")[0]: t["avg_ts"] for t in out["results"]}


def llama(a, model, depth):
    command = [a.llama_bench, "-m", model, "-p", str(a.prompt), "-n", str(a.generate), "-d", str(depth),
               "-r", "1", "-t", str(a.threads), "-fa", "1", "-o", "json"]
    env = {**os.environ, "LD_LIBRARY_PATH": str(Path(a.llama_bench).parent)}
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    return {("pp%d" % t["n_prompt"] if t["n_prompt"] else "tg%d" % t["n_gen"]): t["avg_ts"] for t in out}


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("halcyon")
    p.add_argument("llama_bench")
    p.add_argument("models", nargs="+")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("-p", "--prompt", type=int, default=512)
    p.add_argument("-n", "--generate", type=int, default=128)
    p.add_argument("-d", "--depths", default="0,4096")
    a = p.parse_args()
    for model in a.models:
        for depth in a.depths.split(","):
            rates = {}
            for _ in range(a.rounds):
                for name, run in [("halcyon", halcyon), ("llama.cpp", llama)]:
                    for test, rate in run(a, model, int(depth)).items():
                        rates.setdefault(test, {}).setdefault(name, []).append(rate)
            for test, by in rates.items():
                ratios = [x / y for x, y in zip(by["halcyon"], by["llama.cpp"])]
                print(f"{Path(model).name:28} depth {depth:>5} {test:>6}  halcyon {median(by['halcyon']):8.1f}"
                      f"  llama.cpp {median(by['llama.cpp']):8.1f}  ratio {median(ratios):5.2f}"
                      f"  ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


main()
