"""What is written in C, once more as processors without AVX-512 have it: with AVX2, two registers for one."""

from __future__ import annotations

import pytest

from allmask.kernels import build, rms_norm
from tests.decoding.test_engines import (  # noqa: F401
    test_any_rows_at_any_time,
    test_int8_by_whole_numbers,
    test_no_row_depends_on_the_others,
    test_the_compiled_step_computes_what_torch_computes,
)
from tests.inference.test_compiled_layers import test_layers_in_c_equal_those_in_torch  # noqa: F401
from tests.kernels.test_int8 import (  # noqa: F401
    test_a_feed_forward_layer_is_two_linear_ones,
    test_a_linear_layer_by_whole_numbers_bit_for_bit,
    threads,
)
from tests.kernels.test_packed_attention import (  # noqa: F401
    test_documents_read_all_of_their_partners,
    test_dropout_equals_autograd_through_the_explicit_mask,
    test_values_and_gradients_equal_attention_written_out,
)
from tests.kernels.test_rms_norm import (  # noqa: F401
    test_many_rows_and_wide_ones,
    test_values_and_gradients_are_those_of_double_precision,
)
from tests.kernels.test_top_tokens import (  # noqa: F401
    test_both_ways_agree,
    test_the_best_by_sorting,
    test_totals_are_those_of_double_precision,
    way,
)


@pytest.fixture(autouse=True)
def no_avx512(monkeypatch):
    if not build.has(build.AVX512):
        pytest.skip("this processor has no AVX-512: all tests are of AVX2")
    has = build.has
    monkeypatch.setattr(build, "has", lambda instructions: "avx512f" not in instructions and has(instructions))
    libraries = build.library, rms_norm.library
    for library in libraries:
        library.cache_clear()
    yield
    for library in libraries:
        library.cache_clear()
