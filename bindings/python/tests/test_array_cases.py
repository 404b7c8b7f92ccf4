"""Generated cases of the array API: Halcyon's results against those of another implementation.

The other implementation is array-api-strict, or NumPy where it is missing. `HALCYON_SEED` sets the seed;
with `HALCYON_CASES=all` there are more cases. A failure prints the seed of its case.
"""

import os

import halcyon.array as xp
import numpy as np
import pytest
from array_cases.compare import Mismatch, outcome, same
from array_cases.generate import cases

try:
    import array_api_strict as reference
except ImportError:
    reference = np

SEED = os.environ.get("HALCYON_SEED", "20")
COUNT = 20_000 if os.environ.get("HALCYON_CASES") == "all" else 3000


# NumPy's own functions of these names differ from the standard: other arguments, other types, or no order.
NOT_NUMPY = {"argsort", "can_cast", "fft.fftfreq", "fft.rfftfreq", "sort", "unique_values"}


def disagreement(case, ref) -> str | None:
    """What differs between the two implementations; None if nothing."""
    got = outcome(case, xp)
    if case.check == "error":
        if not isinstance(got, (TypeError, ValueError, IndexError, OverflowError)):
            return f"it should raise an error, and gave {got!r}"
        return None
    if ref is np and case.name in NOT_NUMPY:
        return f"it raised {got!r}" if isinstance(got, Exception) else None
    # The reference is stricter than slices of the standard are.
    want = outcome(case, np if case.name in ("getitem", "setitem") else ref)
    if isinstance(want, Exception):
        return f"the reference raised {want!r}; Halcyon gave {got!r}"
    if isinstance(got, Exception):
        return f"it raised {got!r}"
    try:
        same(got, want, case)
    except Mismatch as e:
        return str(e)
    return None


def check(seed: str, count: int, ref, beyond: bool = False) -> None:
    wrong = []
    names = set()
    for own, case in cases(seed, count, beyond):
        names.add(case.name)
        what = disagreement(case, ref)
        if what is not None:
            wrong.append(f"seed {own}: {case}\n    {what}")
    print(f"{count} cases of {len(names)} functions against {ref.__name__}, {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} of {count} cases are wrong:\n" + "\n".join(wrong[:40])


def test_cases_against_the_reference():
    check(SEED, COUNT, reference)


def test_indexing_beyond_the_standard_is_that_of_numpy():
    check(f"{SEED}/numpy", max(100, COUNT // 10), np, beyond=True)


@pytest.mark.skipif(reference is np, reason="array-api-strict is not installed")
def test_errors_of_the_cases_are_errors_of_the_reference():
    # What must be an error for Halcyon is one for the reference too. These are the exceptions.
    lenient = ("repeat", "searchsorted", "getitem", "isdtype", "asarray")
    for own, case in cases(f"{SEED}/errors", COUNT):
        if case.check == "error" and case.name not in lenient:
            assert isinstance(outcome(case, reference), Exception), f"seed {own}: {case}"
