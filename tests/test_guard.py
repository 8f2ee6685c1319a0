"""Every training and predicting command still gives the same bits: tests/guard says how, and how to record them."""

from __future__ import annotations

import warnings

import pytest

from tests.guard import record
from tests.guard.recipes import GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_commands_give_what_they_gave(group: str):
    old, bits = record.expected()
    if not bits:
        warnings.warn(f"numbers were compared, not bits: no record of {record.signature()}", stacklevel=1)
    found = record.differences(group, old[group], record.measured(group), bits)
    assert not found, "\n".join(f"{group}/{entry}: {what}" for entry, what in found.items())
