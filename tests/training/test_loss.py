"""The blocked KL with hand-made gradients, against autograd through ``kl_div``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from specbench.drafters.training import loss as module
from specbench.drafters.training.loss import linear_kl, teacher_probs


def draws(num_rows: int = 37, vocab: int = 50, width: int = 16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "post": torch.randn(num_rows, width, generator=g, dtype=torch.float64, requires_grad=True),
        "head": torch.randn(vocab, width, generator=g, dtype=torch.float64, requires_grad=True),
        "final": torch.randn(20, width, generator=g, dtype=torch.float64),
        "teacher": torch.randn(vocab, width, generator=g, dtype=torch.float64),
        "index": torch.randint(0, 20, (num_rows,), generator=g),
        "scale": torch.rand(num_rows, generator=g),
    }


@pytest.mark.parametrize("block_bytes", [1, 20 * 50 * 8, 1 << 30])
def test_value_and_gradients_equal_autograd(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    x = draws()
    x["scale"][3] = 0.0
    probs = teacher_probs(x["final"], x["teacher"])
    torch.testing.assert_close(probs, (x["final"] @ x["teacher"].T).softmax(-1))
    out = linear_kl(x["post"], x["head"], probs, x["index"], x["scale"])
    (1.7 * out.loss).backward()
    got = x["post"].grad, x["head"].grad
    x["post"].grad = x["head"].grad = None
    logits = x["post"] @ x["head"].T
    kl = F.kl_div(logits.log_softmax(-1), probs[x["index"]], reduction="none").sum(-1)
    expected = (x["scale"] * kl).sum()
    (1.7 * expected).backward()
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], x["post"].grad)
    # the head's gradient is summed up in float32
    torch.testing.assert_close(got[1], x["head"].grad, rtol=1e-5, atol=1e-5)
    assert got[0][3].abs().sum() == 0
    assert torch.equal(out.best, logits.argmax(-1))


def test_gradient_is_made_without_the_value() -> None:
    x = draws()
    probs = teacher_probs(x["final"], x["teacher"])
    grads = []
    for with_loss in (True, False):
        out = linear_kl(x["post"], x["head"].detach(), probs, x["index"], x["scale"], with_loss=with_loss)
        assert (float(out.loss.detach()) == 0) is not with_loss
        (grad,) = torch.autograd.grad(out.loss, x["post"])
        grads.append(grad)
    assert torch.equal(*grads)


def test_no_logits_are_kept() -> None:
    post = torch.randn(4096, 8, requires_grad=True)
    head = torch.randn(2048, 8)
    probs = teacher_probs(torch.randn(4, 8), head)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_kl(post, head, probs, torch.zeros(4096, dtype=torch.int64), torch.ones(4096))
    assert sum(kept) <= 2 * post.numel()
