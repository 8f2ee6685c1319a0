"""What is written in C, once more as processors without AVX-512 have it: with AVX2, two registers for one."""

from __future__ import annotations

import pytest

from allmask import native
from tests.decoding.test_engines import (  # noqa: F401
    test_any_rows_at_any_time,
    test_int8_by_whole_numbers,
    test_no_row_depends_on_the_others,
    test_the_compiled_step_computes_what_torch_computes,
)
from tests.decoding.test_shortlist import (  # noqa: F401
    test_both_ways_agree,
    test_the_best_by_sorting,
    test_totals_are_those_of_double_precision,
    way,
)
from tests.test_bytes import (  # noqa: F401
    test_a_feed_forward_layer_is_two_linear_ones,
    test_a_linear_layer_by_whole_numbers_bit_for_bit,
    test_layers_in_c_say_what_torch_says,
    threads,
)
from tests.test_documents import (  # noqa: F401
    test_documents_read_all_of_their_partners,
    test_dropout_equals_autograd_through_the_explicit_mask,
    test_values_and_gradients_equal_attention_written_out,
)


@pytest.fixture(autouse=True)
def no_avx512(monkeypatch):
    if not native.has(native.AVX512):
        pytest.skip("this processor has no AVX-512: all tests are of AVX2")
    has = native.has
    monkeypatch.setattr(native, "has", lambda instructions: "avx512f" not in instructions and has(instructions))
    native.library.cache_clear()
    yield
    native.library.cache_clear()
