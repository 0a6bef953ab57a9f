"""The stand-in of the launcher, in whose place tests of doors put it."""

from __future__ import annotations

import pytest
from door_harness import Launcher

from microsdpa.attention import api, varlen
from microsdpa.execution import forward
from microsdpa.integrations import dropin


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    found = Launcher()
    for module in (api, forward, varlen):
        monkeypatch.setattr(module, "_launch", found)
    for module in (api, forward, dropin):
        monkeypatch.setattr(module, "_launch_or_kind", found)
    for module in (api, forward):
        monkeypatch.setattr(module, "_launch_known", found.with_a_known_mask)
    monkeypatch.setattr(api, "_launch_scaled", found.with_scales)
    return found
