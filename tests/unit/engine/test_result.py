"""What a step brought is read once it is there."""

import numpy as np
import pytest
import torch

from glm5.engine.runner import result
from glm5.engine.runner.result import Launched, Pending, PromptLogprobs
from glm5.engine.sampling.logprobs import Logprobs


class Device:
    """Copies to the host that take until somebody waits for what was recorded behind them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        device = self

        class Event:
            def record(self) -> None:
                self.ends = len(device.copies)

            def synchronize(self) -> None:
                for known, out in device.copies[: self.ends]:
                    out.copy_(known)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(result, "_to_host", self._to_host)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        out = torch.full(tensor.shape, -7, dtype=tensor.dtype)
        self.copies.append((torch.ones_like(out), out))
        return out


def on_device(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_a_chunk_that_samples_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """Its log-probabilities are on their way, though there is no token: memory of no bytes is never pinned."""
    Device(monkeypatch)
    floats = torch.float32
    found = Logprobs(
        logprob_T=on_device(2, dtype=floats),
        tempered_T=on_device(2, dtype=floats),
        rank_T=on_device(2),
        top_token_TU=on_device(2, 1),
        top_logprob_TU=on_device(2, 1, dtype=floats),
        top_tempered_TU=on_device(2, 1, dtype=floats),
    )
    launched = Launched(
        Pending(
            [],
            np.zeros(0, dtype=np.int64),
            max_depth=0,
            tokens_B=on_device(0, 1),
            count_B=on_device(0),
            no_valid_token_T=on_device(0, dtype=torch.bool),
            prompt_logprobs={5: PromptLogprobs(on_device(2), found, 1)},
        )
    )
    entries = launched.read().prompt_logprobs[5]
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in entries] == [(1, 1.0, 1)] * 2
