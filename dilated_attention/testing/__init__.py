"""Tools to test a backend as this library tests its own: random cases, a float64 oracle, bounds derived from the data.

    from dilated_attention.testing import check_backend
    print(check_backend("my_backend", device="cuda", cases=200))

E(x) is the largest absolute error of x against float64. In half precision, and in float32 on a GPU, a result x passes if

    E(x) ≤ 2·E(plain) + band

*plain* is the same result by softmax attention written in plain PyTorch, in the same dtype and over the same keys; a key that several
branches see counts as often. *band* is one rounding of the result. So no tolerance is chosen by hand. What else a bound allows, and why,
is written in ``check.truth_and_bounds``. lse is float32 whatever the dtype of the inputs, so it is judged as float32. float64, and float32
on a CPU, have relative bounds.
"""

from dilated_attention.testing.bounds import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, largest, low_precision_bound, max_error, relative_bound
from dilated_attention.testing.cases import HEAD_DIMS, LAYOUTS, Case, Chooser, Inputs, Space, inputs, make_tensor, random_case
from dilated_attention.testing.check import RESULTS, Measured, Report, Result, call, check_backend, measure, results
from dilated_attention.testing.oracle import dropout_keep, multiplicities, op_seed, plain_attention, reference, rounded_out_error

__all__ = [
    "FLOAT32_TOLERANCE",
    "FLOAT64_TOLERANCE",
    "HEAD_DIMS",
    "LAYOUTS",
    "RESULTS",
    "Case",
    "Chooser",
    "Inputs",
    "Measured",
    "Report",
    "Result",
    "Space",
    "call",
    "check_backend",
    "dropout_keep",
    "inputs",
    "largest",
    "low_precision_bound",
    "make_tensor",
    "max_error",
    "measure",
    "multiplicities",
    "op_seed",
    "plain_attention",
    "random_case",
    "reference",
    "relative_bound",
    "results",
    "rounded_out_error",
]
