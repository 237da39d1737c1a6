"""Tools to test a backend as this library tests its own: random cases, a float64 oracle, bounds derived from the data.

    from dilated_attention.testing import check_backend
    print(check_backend("my_backend", device="cuda", cases=200))

E(x) is the largest absolute error of x against float64. In half precision a result passes if E ≤ 2·E(plain) + band, where *plain*
is softmax attention written in plain PyTorch in the same dtype over the same multiset of keys, and *band* is one rounding of
the result: no tolerance is chosen by hand. lse is float32 whatever the dtype of the inputs, so it is judged as float32.
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
