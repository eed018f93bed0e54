"""Our modules against the speculators library's own, where it is installed; the same weights, the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.drafters.checkpoints.dflash import save_dflash
from specbench.drafters.mtp_drafter import create
from specbench.drafters.scoring import pack_traces

from .helpers import make_target, make_trace
from .mtp_families import DENSE, LAYERS, VOCAB, WIDTH, speculators_dense
from .test_dflash import make_model
from .test_mtp import chain_logits, trace_for

pytest.importorskip("speculators", reason="the speculators library is not installed")


def write_verifier(path: Path, width: int, num_layers: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=num_layers, num_attention_heads=4, vocab_size=VOCAB,
        intermediate_size=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@torch.no_grad()
def test_dflash_loads_there_and_its_layers_give_the_same_states(tmp_path: Path) -> None:
    from speculators.models.dflash.core import DFlashDraftModel

    target = make_target()
    target.path = write_verifier(tmp_path / "verifier", 16, 8)
    model = make_model(target)
    save_dflash(model, tmp_path / "drafter", "speculators", target)
    theirs: Any = DFlashDraftModel.from_pretrained(str(tmp_path / "drafter")).eval()
    state = theirs.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name

    trace = make_trace((6, 4), 1)
    packed, rows = pack_traces([trace], taps=model.config.taps, name="", device=torch.device("cpu"))
    ours = model.block(model.context(packed.taps, packed.positions), packed, rows)
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    for i, row in enumerate(rows.tolist()):
        context = theirs.hidden_norm(theirs.fc(torch.cat([t[: row + 1] for t in packed.taps], dim=-1)))[None]
        x = model.block_inputs(packed.inputs[row : row + 1])
        positions = torch.arange(row + 1 + model.config.block_size)[None]
        for layer in theirs.layers:
            x = layer(
                hidden_states=x, target_hidden=context, attention_mask=None,
                position_embeddings=theirs.rotary_emb(x, positions),
            )  # fmt: skip
            x = x[0] if isinstance(x, tuple) else x
        torch.testing.assert_close(ours[i], theirs.norm(x)[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_mtp_head_gives_the_same_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    from speculators.models.mtp.core import MTPDraftModel

    reference = speculators_dense(tmp_path / "head")
    verifier = write_verifier(tmp_path / "verifier", WIDTH, LAYERS)
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    config["speculators_config"] |= {
        "algorithm": "mtp",
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": str(verifier), "architectures": []},
    }
    file.write_text(json.dumps(config | {"transformer_layer_config": DENSE | {"model_type": "qwen3"}}))
    theirs: Any = MTPDraftModel.from_pretrained(str(tmp_path / "head")).eval()
    theirs.embed_tokens.weight.copy_(reference.target.embed)
    theirs.lm_head.weight.copy_(reference.target.head)

    drafter = create(str(tmp_path / "head"), {}, reference.target)
    trace = trace_for(1)
    states = reference.norms["target"](trace.taps[LAYERS])
    states = torch.cat((states, states.new_zeros(1, WIDTH)))[None]
    (first, *_rest), _loss, _metrics = theirs(torch.tensor([trace.ids]), states)
    compared = 0
    for start, logits in enumerate(chain_logits(drafter, trace)):
        row = len(trace.prompt.token_ids) + start - 1
        if row < first.shape[1]:
            torch.testing.assert_close(logits[0], first[0, row], atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared
