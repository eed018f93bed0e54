"""Trace packs: what is written is what is read, and scoring on a pack equals scoring beside the target."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specbench.cli import main
from specbench.config import RunConfig
from specbench.drafters.checkpoints.save import save_drafter
from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
from specbench.errors import UserError
from specbench.results.aggregate import write_acceptance
from specbench.results.store import RunStore
from specbench.runners import packed
from specbench.runners.answers import Answerer
from specbench.runners.packed import estimate_bytes, pack_plan, settle, trace
from specbench.runners.pipeline import Observer, load_chat, run
from specbench.runners.targets import Target, load_tokenizer
from specbench.runners.trace_pack import PackWriter, TracePack
from specbench.types import ConditionInfo, RenderedPrompt, Sampling, Span, TargetInfo, TargetWeights, Trace

TAPS = (1, 4, 5)
GREEDY = {"answer_path": "both"}
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 3}


@pytest.fixture(scope="session")
def prompts_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "dialogue.jsonl"
    lines = [
        {"id": "sea", "turns": ["Name three seas.", "Which is the deepest?"], "category": "facts"},
        {"id": "sum", "turns": ["Add 2 and 3."], "category": "maths"},
        {"id": "tale", "turns": ["Begin a tale.", "Go on.", "End it."], "category": "prose"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def eagle_path(tiny_target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = Target.load(str(tiny_target_path), device="cpu").weights()
    config = Eagle3Config.for_target(
        weights.info, taps=TAPS, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, head="own"
    )
    model = Eagle3Model(config, weights)
    model.init_weights(torch.Generator().manual_seed(1), 0.2)
    path = tmp_path_factory.mktemp("drafter") / "eagle"
    save_drafter(model, path)
    return path


@pytest.fixture(scope="session")
def base(tiny_target_path: Path, prompts_path: Path) -> RunConfig:
    return RunConfig(
        suite=(str(prompts_path),),
        perturb=("template/no_bos", "template/no_template"),
        target=str(tiny_target_path),
        max_new_tokens=14,
        device="cpu",
        depth=(2, 4),
    )


@pytest.fixture(scope="session")
def drafters(tiny_target_path: Path, eagle_path: Path) -> str:
    return f"ngram,draft-lm={tiny_target_path},eagle3={eagle_path}"


@pytest.fixture(scope="session")
def pack_path(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "pack"
    report = trace(replace(base, out=str(path)), Observer(), taps=TAPS)
    assert report is not None and not report.failures
    return path


@pytest.fixture
def copy(pack_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pack_path, tmp_path / "copy"))


def rows(out: Path, table: str) -> pd.DataFrame:
    """A table of a run, without what names the run or measures time, in an order of its own."""
    with RunStore(out, readonly=True) as store:
        frame = store.table(table).to_pandas()
    frame = frame.drop(columns=[c for c in ("run_id", "seconds", "trace_seconds") if c in frame])
    for name in frame.select_dtypes("category"):
        frame[name] = frame[name].astype(str)
    for name in [c for c in frame if frame[c].dtype == object]:
        frame[name] = frame[name].map(
            lambda v: tuple(v) if hasattr(v, "__len__") and not isinstance(v, str) else v
        )
    keys = ["condition", "prompt_id", "turn", "answer_path", "drafter", "k", "round", "start", "num_accepted"]
    return frame.sort_values([k for k in keys if k in frame]).reset_index(drop=True)


def on_pack(path: Path, drafter: str, out: Path, **options: Any) -> RunConfig:
    everything: dict[str, Any] = {"suite": (), "perturb": (), "depth": (2, 4), "device": "cpu"}
    return RunConfig(traces=str(path), drafter=drafter, out=str(out), **(everything | options))


# ---- scoring elsewhere equals scoring here


@pytest.mark.parametrize(
    ("options", "sampler"),
    [(GREEDY, "auto"), (SAMPLED, "match"), (SAMPLED, "rejection")],
    ids=["greedy, both paths", "match", "rejection"],
)
def test_scores_on_a_pack_equal_a_direct_run(
    options: dict[str, Any],
    sampler: str,
    base: RunConfig,
    drafters: str,
    tiny_target_path: Path,
    tmp_path: Path,
) -> None:
    gone = Path(shutil.copytree(tiny_target_path, tmp_path / "gone"))
    config = replace(base, **options)
    direct = replace(config, drafter=drafters, sampler=sampler, out=str(tmp_path / "direct"))
    assert run(direct, Observer()).failures == {}  # type: ignore[union-attr]
    trace(replace(config, target=str(gone), out=str(tmp_path / "pack")), Observer(), taps=TAPS)
    shutil.rmtree(gone)
    scored = on_pack(tmp_path / "pack", drafters, tmp_path / "scored", sampler=sampler)
    assert run(scored, Observer()).failures == {}  # type: ignore[union-attr]

    for table in ("rounds", "answers", "items"):
        left, right = rows(tmp_path / "direct", table), rows(tmp_path / "scored", table)
        if "target" in left:
            left["target"], right["target"] = "", ""  # named by its directory
        assert len(left) > 0
        pd.testing.assert_frame_equal(left, right)
    if sampler != "rejection":
        everything = rows(tmp_path / "scored", "rounds")
        everything = everything[everything.drafter.str.startswith("draft-lm") & (everything.k == 4)]
        assert everything.num_accepted.sum() > 0
    tables = [pd.read_parquet(write_acceptance(tmp_path / name)) for name in ("direct", "scored")]
    ignored = [c for c in ("run_id", "run", "target") if c in tables[0]]
    pd.testing.assert_frame_equal(*(t.drop(columns=ignored) for t in tables))


def test_run_record_names_the_pack(pack_path: Path, tmp_path: Path) -> None:
    run(on_pack(pack_path, "ngram", tmp_path / "run"), Observer())
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    digest = hashlib.sha256((pack_path / "pack.json").read_bytes()).hexdigest()
    assert record["trace_pack"]["checksum"] == digest[:16]
    assert record["prompts_hash"] == json.loads((pack_path / "pack.json").read_text())["prompts_hash"]
    assert record["config"]["max_new_tokens"] == 14


def test_a_second_start_scores_only_what_is_missing(copy: Path, tmp_path: Path) -> None:
    first = run(on_pack(copy, "ngram", tmp_path / "run"), Observer())
    before = rows(tmp_path / "run", "rounds")
    for shard in copy.glob("shard-*"):
        shard.write_bytes(b"\0" * shard.stat().st_size)  # reading one would fail
    again = run(on_pack(copy, "ngram", tmp_path / "run"), Observer())
    assert first is not None and again is not None
    assert (first.resumed, again.resumed) == (0, len(TracePack(copy)))
    pd.testing.assert_frame_equal(before, rows(tmp_path / "run", "rounds"))


def test_another_pack_under_the_same_name_is_refused(copy: Path, tmp_path: Path) -> None:
    run(on_pack(copy, "ngram", tmp_path / "run"), Observer())
    record = json.loads((copy / "pack.json").read_text())
    (copy / "pack.json").write_text(json.dumps(record | {"command": "another"}))
    with pytest.raises(UserError, match="the trace pack changed since"):
        run(on_pack(copy, "ngram", tmp_path / "run"), Observer())


# ---- what is in a pack


def test_pack_is_readable_without_specbench(pack_path: Path, tiny_target_path: Path) -> None:
    record = json.loads((pack_path / "pack.json").read_text())
    listed = {p.name for p in pack_path.iterdir()} - {"pack.json", ".lock"}
    assert set(record["files"]) == listed
    for name, facts in record["files"].items():
        content = (pack_path / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (facts["bytes"], facts["sha256"])
    index = pd.read_parquet(pack_path / "index.parquet")
    # 6 turns under each of the three conditions
    assert len(index) == record["num_traces"] == 18
    model = load_file(tiny_target_path / "model.safetensors")
    head = load_file(pack_path / "head.safetensors")
    assert torch.equal(head["embed"], model["model.embed_tokens.weight"])
    assert torch.equal(head["head"], model["lm_head.weight"])
    assert torch.equal(head["norm"], model["model.norm.weight"])


def test_states_and_facts_are_the_targets_own(pack_path: Path, tiny_target_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target_path).eval()
    traces = list(TracePack(pack_path))
    later = [t for t in traces if t.prompt.turn == 2]
    assert later and {len(t.taps) for t in traces} == {3}
    for one in later:
        with torch.no_grad():
            out = model(torch.tensor([one.ids[:-1]]), output_hidden_states=True)
        for tap in TAPS:
            torch.testing.assert_close(one.taps[tap], out.hidden_states[tap][0], atol=2e-4, rtol=1e-4)
        logits = out.logits[0, one.prompt_length - 1 :].log_softmax(-1)
        picked = logits[torch.arange(len(one.answer_ids)), list(one.answer_ids)]
        torch.testing.assert_close(one.logprobs, picked, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(one.entropies, -(logits.exp() * logits).sum(-1), atol=1e-3, rtol=1e-3)
        assert list(one.answer_ids) == logits.argmax(-1).tolist()


def test_tied_head_is_stored_once(tmp_path: Path) -> None:
    weights = toy_weights(tied=True)
    with_pack(tmp_path / "pack", weights, [toy_trace(0, 3, 4)])
    assert set(load_file(tmp_path / "pack" / "head.safetensors")) == {"embed", "norm"}
    again = TracePack(tmp_path / "pack").weights()
    assert again.head is again.embed and torch.equal(again.embed, weights.embed)
    assert again.info == weights.info


def toy_weights(tied: bool = False, dtype: torch.dtype = torch.float32) -> TargetWeights:
    g = torch.Generator().manual_seed(0)
    embed = torch.randn(11, 4, generator=g).to(dtype)
    head = embed if tied else torch.randn(11, 4, generator=g).to(dtype)
    info = TargetInfo(
        name="toy",
        fingerprint="f" * 16,
        hidden_size=4,
        num_layers=3,
        vocab_size=11,
        max_positions=64,
        dtype=str(dtype).removeprefix("torch."),
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_id=1,
        stop_ids=(2, 3),
    )
    return TargetWeights(info=info, embed=embed, head=head, norm=torch.ones(4, dtype=dtype))


def toy_trace(
    number: int, num_prompt: int, num_answer: int, dtype: torch.dtype = torch.float32, path: str = "free"
) -> Trace:
    g = torch.Generator().manual_seed(number)
    condition = ConditionInfo(
        id="noise/hidden_0.1",
        family="noise",
        severity=3,
        description='Noise, "quoted".',
        parameters={"noise_path": "hidden", "noise_alpha": 0.1},  # type: ignore[dict-item]
    )
    prompt = RenderedPrompt(
        prompt_id=f"toy/{number}",
        suite="toy",
        category="ärger",
        turn=number % 2,
        condition=condition,
        token_ids=tuple(torch.randint(0, 11, (num_prompt,), generator=g).tolist()),
        spans=(Span(kind="bos", start=0, end=1), Span(kind="user", start=1, end=num_prompt)),
        bos_count=1,
        template_hash="abc",
        notes=("the template has no system role",) * (number % 3),
        max_new_tokens=None if number % 2 else 7,
    )
    length = num_prompt + num_answer - 1
    return Trace(
        prompt=prompt,
        answer_ids=tuple(torch.randint(0, 11, (num_answer,), generator=g).tolist()),
        taps={tap: torch.randn(length, 4, generator=g).to(dtype) for tap in (0, 1, 3)},
        logprobs=-torch.rand(num_answer, generator=g),
        margins=torch.randn(num_answer, generator=g),
        entropies=torch.rand(num_answer, generator=g),
        finish="stop" if number % 2 else "length",
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=8),
        path=path,  # type: ignore[arg-type]
    )


def with_pack(path: Path, weights: TargetWeights, traces: list[Trace], **options: Any) -> None:
    writer = PackWriter(path, weights, config=RunConfig(), taps=(3, 1), prompts_hash="p", **options)
    for one in traces:
        writer.add(one)
    writer.finish()
    writer.close()


def assert_same(read: Trace, written: Trace, taps: tuple[int, ...]) -> None:
    assert read.prompt == written.prompt
    assert (read.answer_ids, read.finish, read.path) == (written.answer_ids, written.finish, written.path)
    assert read.sampling == written.sampling
    assert tuple(read.taps) == taps
    for tap in taps:
        assert read.taps[tap].dtype == written.taps[tap].dtype
        assert torch.equal(read.taps[tap], written.taps[tap])
    for name in ("logprobs", "margins", "entropies"):
        assert torch.equal(getattr(read, name), getattr(written, name))


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shard_bytes=st.sampled_from([1, 400, 1 << 20]),
)
def test_what_is_read_is_what_was_written(
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    shard_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("round") / "pack"
    written = [toy_trace(i, p, a, dtype, ("free", "forced")[i % 3 == 2]) for i, (p, a) in enumerate(sizes)]
    with_pack(path, toy_weights(dtype=dtype), written, shard_bytes=shard_bytes)
    pack = TracePack(path)
    read = {(*t.prompt.key, t.path): t for t in pack}
    assert len(read) == len(pack) == len(written)
    for one in written:
        assert_same(read[(*one.prompt.key, one.path)], one, (1, 3))
    entry = next(e for e in pack.entries if e.prompt_id == "toy/0")
    assert (entry.prompt_tokens, entry.answer_tokens) == sizes[0]
    assert tuple(pack.trace(entry.number, taps=(3,)).taps) == (3,)
    largest = max(
        sum(t.numel() * t.element_size() for t in (*one.taps.values(), one.logprobs)) * 2 for one in written
    )
    for shard in path.glob("shard-*.safetensors"):
        payload = sum(t.numel() * t.element_size() for t in load_file(shard).values())
        assert payload < shard_bytes + largest
    if shard_bytes == 1:
        assert len(list(path.glob("shard-*.safetensors"))) == len(written)


# ---- going on after a stop


class Stopping(Observer):
    """Presses Ctrl-C after some answer tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def tokens(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The keys of all prompts that the target was asked to answer."""
    keys: list[Any] = []
    answer = Answerer.answer

    def listening(self: Answerer, prompts: Any, *given: Any) -> Any:
        keys.extend(p.key for p in prompts)
        return answer(self, prompts, *given)

    monkeypatch.setattr(Answerer, "answer", listening)
    yield keys


def test_finished_traces_are_not_redone(
    base: RunConfig, pack_path: Path, tmp_path: Path, asked: list[Any]
) -> None:
    # one at a time, so that some answers are finished when the keys are pressed
    config = replace(base, out=str(tmp_path / "pack"), batch_size=1)
    for after in (30, 60):
        with pytest.raises(KeyboardInterrupt):
            trace(config, Stopping(after), taps=TAPS)
        with pytest.raises(UserError, match=r"unfinished \(\d+ traces so far\)"):
            TracePack(tmp_path / "pack")
    record = json.loads((tmp_path / "pack" / "pack.json").read_text())
    done = record["num_traces"]
    assert 0 < done < 18
    asked.clear()
    report = trace(config, Observer(), taps=TAPS)
    assert report is not None and report.resumed == done
    assert len(asked) == len(set(asked)) == 18 - done
    whole, pieces = TracePack(pack_path), TracePack(tmp_path / "pack")
    assert [e.key for e in whole.entries] == [e.key for e in pieces.entries]
    for left, right in zip(whole, pieces, strict=True):
        assert (left.prompt, left.answer_ids, left.finish) == (right.prompt, right.answer_ids, right.finish)
        for tap in TAPS:
            torch.testing.assert_close(left.taps[tap], right.taps[tap], atol=1e-4, rtol=1e-4)
    asked.clear()
    trace(config, Observer(), taps=TAPS)
    assert asked == []


def test_a_kill_loses_no_finished_turn(
    base: RunConfig, tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(base, out=str(tmp_path / "pack"), batch_size=1)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(PackWriter, "close", PackWriter._unlock)  # nothing is written on the way out
        trace(config, Stopping(9 * 14 + 5), taps=TAPS)
    asked.clear()
    trace(config, Observer(), taps=TAPS)
    assert {turn for _prompt, turn, _condition in asked} == {1, 2}
    assert len(TracePack(tmp_path / "pack")) == 18


def test_a_writer_that_vanished_leaves_whole_shards(tmp_path: Path) -> None:
    def begin() -> PackWriter:
        return PackWriter(
            tmp_path, toy_weights(), config=RunConfig(), taps=(1,), prompts_hash="p", shard_bytes=1
        )

    writer = begin()
    writer.add(toy_trace(0, 3, 3))
    writer._unlock()  # a killed process writes nothing more and holds no lock
    (tmp_path / "shard-00001.safetensors.partial").write_bytes(b"half a fi")
    writer = begin()
    assert writer.has(("toy/0", 0, "noise/hidden_0.1", "free"))
    assert not writer.has(("toy/0", 0, "noise/hidden_0.1", "forced"))
    writer.add(toy_trace(0, 3, 3))  # there already
    writer.add(toy_trace(1, 2, 5))
    writer.finish()
    writer.close()
    pack = TracePack(tmp_path)
    pack.verify()
    assert [e.prompt_id for e in pack.entries] == ["toy/0", "toy/1"]
    assert_same(pack.trace(1), toy_trace(1, 2, 5), (1,))
    assert not list(tmp_path.glob("*.partial"))


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": RunConfig(), "taps": (1,), "prompts_hash": "p"}
    writer = PackWriter(tmp_path, toy_weights(), **options)
    with pytest.raises(UserError, match="another process"):
        PackWriter(tmp_path, toy_weights(), **options)
    writer.close()
    PackWriter(tmp_path, toy_weights(), **options).close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"taps": (1, 3)}, "the taps"),
        ({"prompts_hash": "other"}, "the prompts"),
        ({"config": RunConfig(temperature=1.0)}, "--temperature"),
    ],
)
def test_a_directory_with_another_pack_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": RunConfig(), "taps": (1,), "prompts_hash": "p"}
    PackWriter(tmp_path, toy_weights(), **options).close()
    with pytest.raises(UserError, match=f"holds another trace pack: {named} is different"):
        PackWriter(tmp_path, toy_weights(), **(options | change))


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"not empty and holds no pack\.json"):
        PackWriter(tmp_path, toy_weights(), config=RunConfig(), taps=(), prompts_hash="")


# ---- keeping one beside a run


def test_keep_traces(base: RunConfig, drafters: str, tmp_path: Path) -> None:
    config = replace(base, drafter=drafters, out=str(tmp_path / "run"))
    run(replace(config, keep_traces=True), Observer())
    pack = TracePack(tmp_path / "run" / "traces")
    assert pack.taps == TAPS
    run(on_pack(pack.path, drafters, tmp_path / "scored"), Observer())
    pd.testing.assert_frame_equal(rows(tmp_path / "run", "rounds"), rows(tmp_path / "scored", "rounds"))


def test_keep_traces_after_the_fact(base: RunConfig, tmp_path: Path, asked: list[Any]) -> None:
    config = replace(base, drafter="ngram", out=str(tmp_path / "run"), answer_path="both")
    run(config, Observer())
    before = rows(tmp_path / "run", "rounds")
    asked.clear()
    report = run(replace(config, keep_traces=True), Observer())
    assert report is not None and not report.failures
    assert asked == []  # the stored answers are traced, none is made again
    pack = TracePack(tmp_path / "run" / "traces")
    assert pack.taps == (2, 4, 5)  # no drafter needs any: those of EAGLE-3 for 8 layers
    assert len(pack) == 18 + 12
    pd.testing.assert_frame_equal(before, rows(tmp_path / "run", "rounds"))


# ---- choosing among what a pack holds


def chosen(pack: TracePack, **options: Any) -> tuple[set[str], set[str]]:
    config = settle(on_pack(pack.path, "ngram", Path("out"), **options), pack)
    _plan, entries = pack_plan(pack, config)
    return {e.condition.id.removeprefix("template/") for e in entries}, {e.prompt_id for e in entries}


def test_filters(pack_path: Path) -> None:
    pack = TracePack(pack_path)
    everyone = {"dialogue/sea", "dialogue/sum", "dialogue/tale"}
    assert chosen(pack) == ({"regular", "no_bos", "no_template"}, everyone)
    assert chosen(pack, perturb=("template/no_bos",)) == ({"regular", "no_bos"}, everyone)
    assert chosen(pack, suite=("dialogue",), limit=2)[1] == {"dialogue/sea", "dialogue/sum"}
    assert chosen(pack, suite=("some/where/dialogue.jsonl",))[1] == everyone
    assert chosen(pack, severity=0)[0] == {"regular"}
    plan, _entries = pack_plan(
        pack, settle(on_pack(pack_path, "ngram", Path("o"), perturb=("templates",)), pack)
    )
    assert any("template/chatml" in sentence for sentence in plan.skipped)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"suite": ("gsm8k",)}, "has no suite 'gsm8k'; it has dialogue"),
        ({"perturb": ("template/chatml",)}, "has nothing of --perturb template/chatml"),
        ({"perturb": ("template/no_boss",)}, "did you mean 'template/no_bos'"),
        ({"temperature": 0.5}, "--temperature 0.5 contradicts the trace pack"),
        ({"max_new_tokens": 99}, "--max-new-tokens 99 contradicts"),
        ({"sampler": "rejection"}, "was made at temperature 0.0: --sampler rejection needs"),
    ],
)
def test_what_a_pack_cannot_give(
    options: dict[str, Any], sentence: str, pack_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        run(on_pack(pack_path, "ngram", tmp_path / "run", **options), Observer())
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("options", [{"runner": "decode"}, {"keep_traces": True}])
def test_what_makes_no_sense_with_a_pack(options: dict[str, Any], pack_path: Path) -> None:
    with pytest.raises(UserError, match="no target runs: leave out --"):
        on_pack(pack_path, "ngram", Path("out"), **options)


def test_missing_tap(base: RunConfig, eagle_path: Path, tmp_path: Path) -> None:
    small = replace(
        base, out=str(tmp_path / "pack"), limit=1, perturb=("template/regular",), max_new_tokens=2
    )
    trace(small, Observer(), taps=(4, 2))
    with pytest.raises(UserError) as caught:
        run(on_pack(tmp_path / "pack", f"eagle3={eagle_path}", tmp_path / "run"), Observer())
    text = str(caught.value)
    assert "needs taps 1, 5, which the trace pack" in text and "(it has 2, 4)" in text
    assert f"specbench trace --config {tmp_path / 'pack' / 'pack.json'} --taps 1,2,4,5 --out NEW" in text


# ---- damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def edit(path: Path, **changes: Any) -> None:
    file = path / "pack.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_corrupt_shard_is_named(copy: Path, tmp_path: Path) -> None:
    flip(copy / "shard-00000.safetensors")
    pack = TracePack(copy)
    assert pack.entries and pack.weights().embed.shape == (259, 64)  # these are whole
    with pytest.raises(UserError, match=r"shard-00000\.safetensors is not what was written"):
        pack.trace(0)
    with pytest.raises(UserError, match=r"shard-00000\.safetensors is not what was written"):
        run(on_pack(copy, "ngram", tmp_path / "run"), Observer())


@pytest.mark.parametrize("name", ["head.safetensors", "index.parquet"])
def test_corrupt_file_is_named(name: str, copy: Path, tmp_path: Path) -> None:
    flip(copy / name)
    with pytest.raises(UserError, match=f"{name} is not what was written"):
        run(on_pack(copy, "ngram", tmp_path / "run"), Observer())


@pytest.mark.parametrize("name", ["head.safetensors", "index.parquet", "shard-00000.safetensors"])
def test_missing_or_cut_file_is_named(name: str, copy: Path) -> None:
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{name} is not what was written"):
        TracePack(copy)
    (copy / name).unlink()
    with pytest.raises(UserError, match=f"lacks .*{name}"):
        TracePack(copy)


def test_other_version(copy: Path) -> None:
    edit(copy, format_version=2, specbench_version="9.1")
    with pytest.raises(UserError, match=r"pack\.json is of trace pack format 2, .* reads format 1.*9\.1"):
        TracePack(copy)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format_version": 1}', '{"format_version": 1, "files": 3}']
)
def test_a_record_that_is_none(content: str, copy: Path) -> None:
    (copy / "pack.json").write_text(content)
    with pytest.raises(UserError, match=r"pack\.json is not a trace pack's record"):
        TracePack(copy)


def test_no_pack_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no trace pack: it has no pack\.json"):
        TracePack(tmp_path)


def test_files_outside_are_not_touched(copy: Path) -> None:
    secret = copy.parent / "secret"
    secret.write_text("x")
    edit(copy, files={"../secret": {"bytes": 1, "sha256": ""}})
    with pytest.raises(UserError, match="outside the pack"):
        TracePack(copy)


def test_damaged_shard_when_going_on(tmp_path: Path) -> None:
    with_pack(tmp_path, toy_weights(), [toy_trace(0, 3, 3)])
    shard = tmp_path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(UserError, match=r"shard-00000\.safetensors is corrupt; delete it"):
        with_pack(tmp_path, toy_weights(), [])
    shard.unlink()
    with_pack(tmp_path, toy_weights(), [toy_trace(1, 3, 3)])
    assert [e.prompt_id for e in TracePack(tmp_path).entries] == ["toy/1"]


# ---- plan and command line


class Listening(Observer):
    """Keeps the plan."""

    plan: Any = None

    def planned(self, plan: Any, config: RunConfig) -> None:
        self.plan = plan


def test_the_size_is_known_before(base: RunConfig, tmp_path: Path) -> None:
    single = tmp_path / "single.jsonl"
    single.write_text("".join(json.dumps({"prompt": f"Count to {n}, please."}) + "\n" for n in range(9)))
    config = replace(base, suite=(str(single),), out=str(tmp_path / "new"))
    observer = Listening()
    assert trace(config, observer, taps=TAPS, dry_run=True) is None
    assert not (tmp_path / "new").exists()
    assert observer.plan.answers == 27
    assert observer.plan.details["taps"] == "1, 4, 5"
    chat = load_chat(load_tokenizer(config.target)[0], config)
    shape = packed.TargetShape.read(config)
    estimate = estimate_bytes(observer.plan, config, chat, shape, 3)
    assert packed.format_bytes(estimate) in observer.plan.details["out"]
    trace(config, Observer(), taps=TAPS)
    real = TracePack(tmp_path / "new").num_bytes
    assert 0.7 * estimate < real < estimate


def test_later_turns_are_in_the_estimate(base: RunConfig) -> None:
    observer = Listening()
    trace(base, observer, taps=TAPS, dry_run=True)
    plan = replace(observer.plan, prompts=[p for p in observer.plan.prompts if p.id == "dialogue/tale"])
    plan = replace(plan, first_turns=[r for r in plan.first_turns if r.prompt_id == "dialogue/tale"])
    cut = replace(plan, prompts=[replace(p, turns=p.turns[:1]) for p in plan.prompts])
    chat = load_chat(load_tokenizer(base.target)[0], base)
    shape = packed.TargetShape.read(base)
    # every later turn repeats what came before it, so three turns cost more than three times the first
    three, one, none = (
        estimate_bytes(p, base, chat, shape, 3) for p in (plan, cut, replace(cut, prompts=[], first_turns=[]))
    )
    assert none == 2 * 259 * 64 * 4
    assert three - none > 3 * (one - none) > 0


def specbench(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return int(stop.value.code or 0)


def test_command_line(
    tiny_target_path: Path,
    prompts_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pack, what = tmp_path / "pack", ["--suite", str(prompts_path), "--perturb", "template/no_bos"]
    options = [
        "--target",
        str(tiny_target_path),
        *what,
        "--max-new-tokens",
        "6",
        "--device",
        "cpu",
        "--limit",
        "2",
    ]
    assert specbench("trace", *options, "--out", str(pack), "--dry-run") == 0
    assert "3 taps" in capsys.readouterr().out and not pack.exists()
    assert specbench("trace", *options, "--out", str(pack)) == 0
    assert "taps 2, 4, 5" in capsys.readouterr().out
    assert (
        specbench("trace", "--config", str(pack / "pack.json"), "--taps", "0,8", "--out", str(tmp_path / "b"))
        == 0
    )
    assert TracePack(tmp_path / "b").taps == (0, 8)
    assert TracePack(tmp_path / "b").prompts_hash == TracePack(pack).prompts_hash
    capsys.readouterr()
    # --suite and --perturb have defaults, which must not choose among a pack's suites
    assert (
        specbench(
            "run", "--traces", str(pack), "--drafter", "ngram", "--out", str(tmp_path / "r"), "--dry-run"
        )
        == 0
    )
    assert "dialogue: 2 prompts" in capsys.readouterr().out
    assert specbench("run", "--traces", str(pack), "--suite", "mini", "--out", str(tmp_path / "r")) == 2
    assert "has no suite 'mini'" in capsys.readouterr().err
    assert (
        specbench("run", "--traces", str(pack), "--max-new-tokens", "128", "--out", str(tmp_path / "r")) == 2
    )
    assert "--max-new-tokens 128 contradicts" in capsys.readouterr().err  # the default, but asked for
    assert specbench("trace", *options, "--taps", "2,9", "--out", str(tmp_path / "c")) == 2
    assert (
        "--taps names 9, but the target has the hidden states 0 (embeddings) to 8" in capsys.readouterr().err
    )
    assert specbench("trace", *options, "--taps", "two", "--out", str(tmp_path / "c")) == 2
    assert "whole numbers" in capsys.readouterr().err
