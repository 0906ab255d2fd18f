"""The training-time test against the chains that decoding runs: one position, one proposal at a time."""

from dataclasses import replace

import pytest
import torch

from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_checkpoint import untrained_head
from eyas.models.layers import RopeSpec
from eyas.models.recipe import load_recipe, materialize
from eyas.models.tiny_targets import random_tensors
from eyas.models.weights import TensorSource
from eyas.training.ttt import unroll

T, WIDTH = 12, 48
VARIANTS = {
    "as trained here": {},
    "raw feedback": {"norm_output": False, "norm_before_residual": False},
    "two layers, norms a head": {"n_layers": 2, "qk_norm": True},
    "a window": {"window": 6},
    "llama3 rope": {"rope": RopeSpec(10000.0, "llama3", 4.0, original_max=64)},
    "one key head": {"n_heads": 4, "n_kv_heads": 1},
}


def head_of(**changes) -> Eagle3Head:
    embed = TensorSource(torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0)))
    made = untrained_head(target_vocab_size=128, target_hidden_size=WIDTH, target_layers=4, target_embed=embed)
    head = Eagle3Head(replace(made.config, **changes), 64)
    materialize(head, "draft.", random_tensors(head, 1), load_recipe("none"), torch.float32)
    return head


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_each_position_has_the_chain_that_it_has_alone(changes):
    """Step k of row i is the last row of the head over positions 0..i with features, and k rows of its own making."""
    head, steps = head_of(**changes), 4
    generator = torch.Generator().manual_seed(2)
    embeds, features = (torch.randn(2, T + steps, WIDTH, generator=generator) for _ in range(2))
    made = list(unroll(head, embeds, features, steps))
    for i in (0, 1, 5, T - 1):
        known = features[:, : i + 1]
        for k in range(steps):
            out, g = head.recompute(embeds[:, : i + 1 + k], known)
            torch.testing.assert_close(made[k][:, i], out[:, -1], rtol=1e-4, atol=1e-5)
            known = torch.cat([known, g[:, -1:]], dim=1)
