"""The checkpoint doctor on a corpus of broken checkpoints, and on sound ones: the right verdict on each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from specbench.drafters.checkpoints.load import load_checkpoint
from specbench.drafters.checkpoints.save import save_drafter
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.mtp_drafter import MtpDrafter
from specbench.errors import SpecbenchWarning, UserError
from specbench.results.checkup import DECLARED, Checkup, Reading, compare
from specbench.runners.check import examine, needed_taps, possible_settings, resettled
from specbench.types import ScoreRequest, Trace

from .follower import USED, VOCAB, make_model, make_mtp, make_target, make_trace, train

pytestmark = pytest.mark.filterwarnings("ignore::specbench.errors.SpecbenchWarning")

TARGET = make_target()
STEPS = 100


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that are what they say: post-norm with input norms, plain, and one trained on doubled BOS."""
    kinds: dict[str, tuple[dict[str, Any], int]] = {
        "post": ({"feedback": "post", "norm_per_tap": True}, 1),
        "pre": ({"feedback": "pre"}, 1),
        "doubled": ({"feedback": "post", "norm_per_tap": True}, 2),
    }
    found = {}
    for name, (switches, bos) in kinds.items():
        torch.set_num_threads(1)
        model = make_model(TARGET, **switches)
        train(model, steps=STEPS, bos=bos)
        found[name] = tmp_path_factory.mktemp("sound") / name
        save_drafter(model.eval(), found[name])
    return found


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    return {
        DECLARED: [make_trace(i) for i in range(12)],
        # fewer prompts, as the command has it
        "BOS doubled": [make_trace(i, bos=2) for i in range(6)],
    }


def run(path: Path, traces: dict[str, list[Trace]]) -> Checkup:
    loaded = load_checkpoint(str(path), TARGET)
    drafter = Eagle3Drafter(loaded.model, TARGET.info, path.name, loaded.notes)
    return examine(drafter, TARGET, traces, 3, draws=2000)


Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
Break = Callable[[Config, Tensors], None]


def broken(source: Path, into: Path, *breaks: Break) -> Path:
    """A copy of a checkpoint with its configuration or its tensors changed."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for change in breaks:
        change(config, tensors)
    into.mkdir(parents=True, exist_ok=True)
    (into / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, into / "model.safetensors")
    return into


def declare(**values: Any) -> Break:
    def change(config: Config, _tensors: Tensors) -> None:
        config.update(values)

    return change


def shift_taps(offset: int) -> Break:
    def change(config: Config, _tensors: Tensors) -> None:
        taps = [t + offset for t in config["eagle_aux_hidden_state_layer_ids"]]
        config["eagle_aux_hidden_state_layer_ids"] = taps
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = taps

    return change


def drop_input_norm(config: Config, tensors: Tensors) -> None:
    config["fc_norm"] = False
    for name in [n for n in tensors if n.startswith("fc_norm.")]:
        del tensors[name]


def vocabulary(make: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """Replace d2t, given the target ids; t2d goes, as in exporters that write only one."""

    def change(_config: Config, tensors: Tensors) -> None:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = make(ids)
        tensors.pop("t2d")

    return change


def offsets(ids: torch.Tensor) -> torch.Tensor:
    return ids - torch.arange(len(ids))


def shifted_entries(ids: torch.Tensor) -> torch.Tensor:
    """Every entry holds its left neighbour's token; the first one a token of its own."""
    return offsets(torch.cat((torch.zeros(1, dtype=ids.dtype), ids[:-1])))


def another_vocabulary(ids: torch.Tensor) -> torch.Tensor:
    """A map of the right size and form that belongs to other weights."""
    g = torch.Generator().manual_seed(5)
    return offsets(torch.randperm(VOCAB, generator=g)[: len(ids)].sort().values)


def untrained(_config: Config, tensors: Tensors) -> None:
    g = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensors[name] = torch.randn(tensor.shape, generator=g) * 0.08


def with_nan(_config: Config, tensors: Tensors) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


CORPUS: dict[str, tuple[str, tuple[Break, ...], str]] = {
    "post declared as pre": ("post", (declare(norm_output=False),), "feedback=post"),
    "pre declared as post": ("pre", (declare(norm_output=True),), "feedback=pre"),
    "input norms dropped": ("post", (drop_input_norm,), "input_norm=per_tap"),
    "taps one too low": ("post", (shift_taps(-1),), "taps+1"),
    "taps one too high": ("pre", (shift_taps(1),), "taps-1"),
    "residual norm declared": (
        "pre",
        (declare(norm_before_residual=True),),
        "norm_before_residual=false",
    ),
    "d2t one too high": ("post", (vocabulary(lambda ids: offsets(ids) + 1),), "vocab_map-1"),
    "d2t one too low": ("pre", (vocabulary(lambda ids: offsets(ids) - 1),), "vocab_map+1"),
    "d2t shifted by an entry": ("post", (vocabulary(shifted_entries),), "vocab_map rolled -1"),
    "d2t of other weights": ("post", (vocabulary(another_vocabulary),), "vocab_map learned from the answers"),
    "wrong rope": ("post", (declare(rope_theta=1e6, rope_parameters=None),), "rope=target's"),
    "trained on doubled BOS": ("doubled", (), "BOS doubled"),
}
"""What is wrong -> (sound checkpoint, changes, the setting that has to come out best)."""


@pytest.mark.parametrize("kind", CORPUS)
def test_a_broken_checkpoint_is_named(
    kind: str, sound: dict[str, Path], traces: dict[str, list[Trace]], tmp_path: Path
) -> None:
    source, breaks, expected = CORPUS[kind]
    checkup = run(broken(sound[source], tmp_path / "broken", *breaks), traces)
    assert not checkup.healthy
    assert checkup.tried[0].name == expected, [(t.name, t.relative) for t in checkup.tried[:4]]
    assert checkup.tried[0].better
    assert checkup.verdict.startswith(f"suspicious: {expected}")
    assert checkup.tried[0].advice in checkup.verdict


def test_d2t_that_holds_ids(sound: dict[str, Path], traces: dict[str, list[Trace]], tmp_path: Path) -> None:
    """Ids where offsets belong leave the vocabulary and are refused."""
    with pytest.raises(UserError, match="it holds offsets, not ids"):
        run(broken(sound["post"], tmp_path / "refused", vocabulary(lambda ids: ids)), traces)


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_no_false_alarm(kind: str, sound: dict[str, Path], traces: dict[str, list[Trace]]) -> None:
    checkup = run(sound[kind], traces)
    assert checkup.healthy, checkup.verdict
    assert checkup.verdict.startswith("healthy: the declared setting (feedback " + kind)
    assert not any(t.better for t in checkup.tried)
    assert {t.name for t in checkup.tried} >= {"taps-1", "taps+1", "vocab_map=identity", "BOS doubled"}


def test_two_defects_are_both_named(
    sound: dict[str, Path], traces: dict[str, list[Trace]], tmp_path: Path
) -> None:
    path = broken(sound["post"], tmp_path / "broken", declare(norm_output=False), shift_taps(1))
    checkup = run(path, traces)
    assert set(checkup.repairs) == {"feedback=post", "taps-1"}
    assert "feedback=post" in checkup.verdict and "taps-1" in checkup.verdict


def test_serious_findings_without_a_better_setting(
    sound: dict[str, Path], traces: dict[str, list[Trace]], tmp_path: Path
) -> None:
    cases = {
        "does not follow this target": (untrained,),
        "NaN or infinities": (with_nan,),
        "max_position_embeddings is 20": (declare(max_position_embeddings=20),),
        "never filled in": (vocabulary(torch.zeros_like),),
    }
    for words, breaks in cases.items():
        checkup = run(broken(sound["post"], tmp_path / words, *breaks), traces)
        assert not checkup.healthy
        assert words in checkup.verdict, checkup.verdict


def test_what_the_loader_refuses(
    sound: dict[str, Path], traces: dict[str, list[Trace]], tmp_path: Path
) -> None:
    def eagle1(config: Config, tensors: Tensors) -> None:
        tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * config["hidden_size"]]
        for name in ("norm.weight", "d2t", "t2d"):
            tensors.pop(name)

    def norms_lost(_config: Config, tensors: Tensors) -> None:
        drop_input_norm({}, tensors)

    cases = {"EAGLE-1": eagle1, "lacks fc_norm": norms_lost, "set fc_norm to true": declare(fc_norm=False)}
    for words, change in cases.items():
        with pytest.raises(UserError, match=words):
            run(broken(sound["post"], tmp_path / words, change), traces)


def test_resettled_shares_weights_and_equals_a_reload(sound: dict[str, Path], tmp_path: Path) -> None:
    """A setting tried in memory is the setting that config.json would have given."""
    loaded = load_checkpoint(str(sound["post"]), TARGET)
    drafter = Eagle3Drafter(loaded.model, TARGET.info, "post")
    settings = {s.name: s for s in possible_settings(loaded.model, TARGET)}
    twin = resettled(drafter, TARGET, settings["feedback=pre"])
    assert twin.model.fc.weight.data_ptr() == loaded.model.fc.weight.data_ptr()
    path = broken(sound["post"], tmp_path / "pre", declare(norm_output=False))
    again = Eagle3Drafter(load_checkpoint(str(path), TARGET).model, TARGET.info, "again")
    request = ScoreRequest(depth=3, full_chains=True)
    trace = make_trace(99)
    (a,), (b,) = twin.score([trace], request), again.score([trace], request)
    assert torch.equal(a.forced, b.forced)
    assert needed_taps(drafter, TARGET) == (1, 2, 3, 4, 5, 6, 7)


def test_an_mtp_head_is_examined(traces: dict[str, list[Trace]]) -> None:
    """Sound as trained; with a vocabulary map or a state that is not its own, the mistake is named."""
    target = replace(TARGET, norm=torch.linspace(0.2, 3.0, TARGET.info.hidden_size))
    torch.set_num_threads(1)
    head = make_mtp(target)
    train(head, steps=STEPS)
    sound = MtpDrafter(head.eval(), target.info, "mtp")
    assert examine(sound, target, traces, 3, draws=2000).healthy
    names = {setting.name for setting in possible_settings(head, target)}
    assert {"final_norm=no", "taps-1", "vocab_map+1", "vocab_map-1"} <= names
    settings = {setting.name: setting for setting in possible_settings(head, target)}
    shifted = resettled(sound, target, settings["vocab_map+1"])
    found = examine(shifted, target, traces, 3, draws=2000)
    assert not found.healthy and found.tried[0].name == "vocab_map-1"
    # another state: the weights are shared and only what they read differs
    raw = resettled(sound, target, settings["final_norm=no"])
    state = torch.randn(5, target.info.hidden_size)
    assert torch.equal(raw.model.fuse([state]), state)
    assert not torch.equal(head.fuse([state]), state)
    assert raw.model.norm.weight.data_ptr() == head.norm.weight.data_ptr()


def reading(name: str, accepted: list[int], **changes: Any) -> Reading:
    sums = np.array([[100, a, a, 50, a // 2] for a in accepted], np.float64)
    return Reading(name=name, advice="", sums=sums, **changes)


def test_a_gain_counts_only_where_it_is_sure_and_large() -> None:
    base = reading(DECLARED, [50, 60, 55, 58, 52, 61, 57, 54])
    sure = reading("sure", [60, 70, 66, 67, 63, 70, 68, 64])
    unsure = reading("unsure", [90, 40, 55, 80, 30, 61, 75, 34])
    small = reading("small", [51, 61, 56, 59, 53, 62, 58, 55])
    learned = reading("learned", [60, 70, 66, 67, 63, 70, 68, 64], learned=True)
    found = {t.name: t for t in compare([base, sure, unsure, small, learned], draws=2000)}
    assert [n for n, t in found.items() if t.better] == ["sure"]
    assert found["sure"].difference == pytest.approx((528 - 447) / 800)
    assert found["sure"].relative == pytest.approx(528 / 447 - 1)
    assert found["small"].low > 0  # sure, but under the floor
    assert found["unsure"].low < 0 < found["unsure"].high


def test_the_command(tiny_target_path: Path, tmp_path: Path) -> None:
    """From a directory to table, sentence and exit code, on a random target and a random drafter."""
    from specbench.cli.check import check
    from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
    from specbench.runners.targets import Target

    weights = Target.load(str(tiny_target_path), device="cpu", dtype="float32").weights()
    sizes = {
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "draft_vocab_size": 128,
    }
    model = Eagle3Model(Eagle3Config.for_target(weights.info, **sizes), weights)
    model.init_weights(torch.Generator().manual_seed(0))
    save_drafter(model, tmp_path / "drafter")
    arguments = [str(tmp_path / "drafter"), "--target", str(tiny_target_path), "--limit", "3"]
    arguments += ["--max-new-tokens", "12", "--device", "cpu"]
    result = CliRunner().invoke(check, [*arguments, "--format", "json"], standalone_mode=False)
    record = json.loads(result.stdout)
    assert result.return_value == 1 and not record["healthy"]
    assert record["verdict"].startswith("suspicious: ")
    assert {"feedback=post", "taps+1", "BOS doubled", "rope_theta=500000"} <= {
        s["name"] for s in record["settings"]
    }
    with pytest.raises(UserError, match="kind 'ngram', which has no settings to vary"):
        CliRunner().invoke(check, ["ngram", *arguments[1:]], standalone_mode=False, catch_exceptions=False)


def test_warnings_of_the_loader_come_back_as_remarks(sound: dict[str, Path], tmp_path: Path) -> None:
    path = broken(sound["post"], tmp_path / "zero", vocabulary(torch.zeros_like))
    with pytest.warns(SpecbenchWarning, match="d2t is all zeros"):
        loaded = load_checkpoint(str(path), TARGET)
    drafter = Eagle3Drafter(loaded.model, TARGET.info, "zero", loaded.notes)
    checkup = examine(drafter, TARGET, {DECLARED: [make_trace(i) for i in range(4)]}, 2, draws=500)
    assert any("d2t is all zeros" in r.text for r in checkup.remarks)
    assert len(USED) < VOCAB
