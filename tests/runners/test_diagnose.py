"""Diagnosis: shares against materialised attention and known answers, sizes against NumPy, tables and page end to end."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.config import RunConfig
from specbench.drafters.eagle3_drafter import Eagle3Drafter
from specbench.drafters.modules import rotate
from specbench.errors import UserError
from specbench.results.diagnosis import Value, summarise
from specbench.results.diagnosis_figures import draw
from specbench.results.diagnosis_report import page, write_report
from specbench.results.diagnosis_store import DiagnosisWriter
from specbench.runners.diagnose import Job, Measures, Source, find_sink, load_drafters
from specbench.runners.diagnose_probe import (
    PREFIX_REGIONS,
    RECENT,
    REGIONS,
    Chain,
    OwnTokens,
    Pin,
    SinkSearch,
    Watch,
    region_labels,
    rms,
)
from specbench.runners.replay import walk_rounds
from specbench.types import ScoreRequest, Span, Trace

from ..drafters.eagle3_reference import Naive  # noqa: TID252 - tests are no package
from ..drafters.helpers import make_model, make_target, make_trace  # noqa: TID252 - see above

SPANS = (
    Span(kind="bos", start=0, end=1),
    Span(kind="markup", start=1, end=2),
    Span(kind="system", start=2, end=5),
    Span(kind="context", start=5, end=7),
    Span(kind="user", start=7, end=10),
    Span(kind="generation", start=10, end=11),
)
PROMPT, ANSWER, DEPTH = 11, 9, 4


def trace_of(seed: int, answer: int = ANSWER) -> Trace:
    return make_trace((PROMPT, answer), seed, spans=SPANS, prefix=(1,))


def drafter_of(seed: int = 0, **switches: Any) -> Eagle3Drafter:
    target = make_target()
    return Eagle3Drafter(make_model(target, seed, **switches), target.info, "toy")


def watched(drafter: Eagle3Drafter, trace: Trace, sink: int = 0, depth: int = DEPTH) -> Watch:
    watch = Watch(trace, taps=drafter.info.taps, sink=sink, depth=depth)
    drafter.score([trace], ScoreRequest(depth=depth, full_chains=True), probe=watch)
    return watch


def materialised(drafter: Eagle3Drafter, trace: Trace, row: int, depth: int) -> Iterator[torch.Tensor]:
    """Per step [heads, positions seen]: the chain's attention as plain matrices, one query at a time, in float64."""
    model = drafter.model.double()
    c, layer = model.config, model.layers[0]
    ids = torch.tensor(trace.ids)
    taps = [trace.taps[t].double() for t in c.taps]
    group = c.num_heads // c.num_kv_heads

    def parts(hidden: torch.Tensor, token: int, position: int) -> tuple[torch.Tensor, ...]:
        z, residual = layer.enter(hidden[None], model.embed(ids[token][None]))
        tables = model.rope.tables(torch.tensor([position]), torch.float64)
        q = rotate(layer.self_attn.queries(z), tables)[0]
        k, v = layer.self_attn.keys_values(z, tables)
        return q, k[0].repeat_interleave(group, 0), v[0].repeat_interleave(group, 0), z, residual

    keys, values = [], []
    for p in range(row + 1):
        q, k, v, z, residual = parts(model.fuse([t[p][None] for t in taps])[0], p + 1, p)
        keys.append(k)
        values.append(v)
    for step in range(1, depth + 1):
        scores = torch.einsum("hd,khd->hk", q, torch.stack(keys)) * c.head_dim**-0.5
        weights = torch.softmax(scores, -1)
        yield weights
        out = torch.einsum("hk,khd->hd", weights, torch.stack(values))[None]
        hidden = layer.leave(z, residual, out)
        state = model.feedback(hidden, model.norm(hidden))[0]
        q, k, v, z, residual = parts(state, row + 1 + step, row + step)
        keys.append(k)
        values.append(v)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    feedback=st.sampled_from(["pre", "post"]),
    gate=st.booleans(),
    sink=st.integers(0, 6),
)
def test_shares_equal_those_of_a_materialised_matrix(seed: int, feedback: str, gate: bool, sink: int) -> None:
    drafter, trace = drafter_of(seed, feedback=feedback, gate=gate), trace_of(seed)
    watch = watched(drafter, trace, sink)
    kinds = [next(s.kind for s in SPANS if s.start <= p < s.end) for p in range(PROMPT)]
    names = {"bos": "markup", "generation": "markup"}
    regions = [names.get(k, k) for k in kinds] + ["answer"] * ANSWER
    regions[sink] = "sink"
    for index, row in enumerate(range(PROMPT - 1, PROMPT + ANSWER - 1 - DEPTH)):
        for step, weights in enumerate(materialised(drafter, trace, row, DEPTH), start=1):
            got = {name: share[index] for name, share in watch.attention[step].items()}
            count = weights.shape[1]
            where = [regions[p] if p <= row else "own" for p in range(count - 1)] + ["self"]
            for name in REGIONS:
                mass = weights[:, [i for i, w in enumerate(where) if w == name]].sum(-1)
                torch.testing.assert_close(got[name].double(), mass, atol=2e-5, rtol=1e-3, msg=name)
            for w in RECENT:
                torch.testing.assert_close(
                    got[f"recent_{w}"].double(), weights[:, -w:].sum(-1), atol=2e-5, rtol=1e-3
                )
            entropy = torch.special.entr(weights).sum(-1)
            torch.testing.assert_close(got["entropy"].double(), entropy, atol=1e-4, rtol=1e-3)
    total = sum(watch.attention[2][name] for name in REGIONS)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert watch.deviation < 1e-5


def test_control_is_what_step_1_queries_do_at_the_same_positions() -> None:
    drafter, trace = drafter_of(3), trace_of(3)
    watch = watched(drafter, trace)
    for step in range(1, DEPTH + 1):
        for index in range(len(watch.control[step]["sink"])):
            (weights,) = materialised(drafter, trace, PROMPT - 1 + index + step - 1, 1)
            got = {name: share[index].double() for name, share in watch.control[step].items()}
            torch.testing.assert_close(got["sink"], weights[:, 0], atol=2e-5, rtol=1e-3)
            torch.testing.assert_close(got["self"], weights[:, -1], atol=2e-5, rtol=1e-3)
            own = weights[:, -(step - 1) : -1].sum(-1) if step > 1 else torch.zeros(4).double()
            torch.testing.assert_close(got["own"], own, atol=2e-5, rtol=1e-3)
            torch.testing.assert_close(got["recent_4"], weights[:, -4:].sum(-1), atol=2e-5, rtol=1e-3)


def known(kind: str) -> Eagle3Drafter:
    """A drafter whose attention is known: uniform, all on position 0, all on the query itself."""
    drafter = drafter_of(0, num_heads=2, num_kv_heads=2, head_dim=6)
    layer = drafter.model.layers[0]

    class Keys(torch.nn.Module):
        """Queries and keys that depend on the position alone."""

        def queries(self, z: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(z), 2, 6)

        def keys_values(self, z: torch.Tensor, tables: Any) -> tuple[torch.Tensor, torch.Tensor]:
            # the rotation of pair 0 tells the position; the score then is its angle, or its absence
            position = torch.atan2(tables[1][:, 0, 2], tables[0][:, 0, 2]) * 1e4
            height = {"uniform": 0.0, "sink": -500.0, "self": 500.0}[kind]
            return (height * position)[:, None, None].expand(-1, 2, 6), torch.zeros(len(z), 2, 6)

        def output(self, z: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(z), 16)

    del layer.self_attn
    layer.self_attn = Keys()
    return drafter


@pytest.mark.parametrize("kind", ["uniform", "sink", "self"])
def test_known_attention_gives_the_known_shares(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = known(kind)
    # no rotation of queries: scores are then the keys' heights, ascending or descending with the position
    monkeypatch.setattr("specbench.drafters.chains.rotate", lambda x, tables: x)
    tables = drafter.model.rope.tables

    def heights(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = tables(positions, dtype)
        angle = (positions.float() * 1e-4)[:, None, None]
        return angle.cos().expand_as(cos), angle.sin().expand_as(sin)

    monkeypatch.setattr(drafter.model.rope, "tables", heights)
    trace = trace_of(1)
    watch = watched(drafter, trace)
    for step, shares in watch.attention.items():
        chains = len(shares["sink"])
        seen = (PROMPT + torch.arange(chains) + step - 1).float()
        expected = {
            "uniform": {
                "sink": 1 / seen,
                "self": 1 / seen,
                "own": max(0, step - 2) / seen,
                "system": 3 / seen,
            },
            "sink": {"sink": torch.ones(chains), "self": torch.zeros(chains)},
            "self": {"self": torch.ones(chains), "recent_1": torch.ones(chains), "sink": torch.zeros(chains)},
        }[kind]
        for name, value in expected.items():
            torch.testing.assert_close(
                shares[name], value[:, None].expand(-1, 2), atol=1e-4, rtol=1e-4, msg=f"{name} {step}"
            )
        entropy = seen.log() if kind == "uniform" else torch.zeros(chains)
        torch.testing.assert_close(shares["entropy"], entropy[:, None].expand(-1, 2), atol=1e-2, rtol=1e-3)
    search = find_sink(drafter, [trace])
    assert search.found == (kind == "sink")
    if kind == "sink":
        assert search.position == 0 and search.share == pytest.approx(1, abs=1e-3)


def test_a_sink_has_to_stand_out() -> None:
    search = SinkSearch()
    search.count = 10
    search.mass[3], search.uniform[3] = 0.9, 0.1
    assert search.position == 3 and search.share == pytest.approx(0.09) and search.found
    search.uniform[3] = 0.4
    assert not search.found


def test_labels_follow_the_spans_and_the_sink() -> None:
    labels = region_labels(trace_of(0).prompt, 14, 1)
    names = [PREFIX_REGIONS[i] for i in labels]
    assert names == [
        "markup",
        "sink",
        *["system"] * 3,
        *["context"] * 2,
        *["user"] * 3,
        "markup",
        *["answer"] * 3,
    ]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-6, 1e6))
def test_rms_is_taken_in_float32(seed: int, scale: float) -> None:
    x = np.random.default_rng(seed).normal(size=(5, 64)) * scale
    expected = np.linalg.norm(x.astype(np.float32).astype(np.float64), axis=-1) / 8
    np.testing.assert_allclose(rms(torch.tensor(x, dtype=torch.float32)).numpy(), expected, rtol=1e-5)
    half = torch.tensor(x).clamp(-3e38, 3e38).to(torch.bfloat16)
    expected = np.linalg.norm(half.double().numpy(), axis=-1) / 8
    np.testing.assert_allclose(rms(half).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("feedback", ["pre", "post"])
def test_sizes_are_those_of_a_naive_drafter(feedback: str) -> None:
    """Taps and fused input by NumPy; the raw residual of later steps from what is fed back."""
    drafter, trace = drafter_of(5, feedback=feedback, norm_per_tap=True), trace_of(5)
    watch = watched(drafter, trace)
    rows = np.arange(PROMPT - 1, PROMPT + ANSWER - 2)
    for tap in drafter.info.taps:
        values = trace.taps[tap].numpy()[rows].astype(np.float64)
        np.testing.assert_allclose(watch.sizes[f"tap_{tap}"][1], np.sqrt((values**2).mean(-1)), rtol=1e-5)
    model = drafter.model
    parts = []
    for tap, norm in zip(drafter.info.taps, model.fc_norm, strict=True):
        x = trace.taps[tap].numpy()[rows].astype(np.float64)
        parts.append(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * norm.weight.detach().numpy())
    fused = np.concatenate(parts, -1) @ model.fc.weight.detach().numpy().T.astype(np.float64)
    np.testing.assert_allclose(watch.sizes["fused"][1], np.sqrt((fused**2).mean(-1)), rtol=1e-4)
    assert sorted(watch.sizes["raw"]) == sorted(watch.sizes["fed_back"]) == [1, 2, 3, 4]
    same = all(torch.equal(watch.sizes["raw"][i], watch.sizes["fed_back"][i]) for i in range(1, 5))
    assert same == (feedback == "pre")


def test_pin_gives_every_step_the_fused_inputs_size() -> None:
    drafter, trace = drafter_of(7, feedback="pre"), trace_of(7)

    class Inputs:
        regions = None

        def __init__(self) -> None:
            self.hidden: dict[int, torch.Tensor] = {}

        def on_step(self, step: int, tensors: Any) -> None:
            self.hidden[step] = tensors["hidden"]

    free, pinned = Inputs(), Inputs()
    request = ScoreRequest(depth=3, full_chains=True)
    drafter.score([trace], request, probe=free)
    drafter.score([trace], request, probe=pinned, perturb=Pin(len(trace.ids) - 1))
    assert torch.equal(free.hidden[1], pinned.hidden[1])
    for step in (2, 3):
        size = rms(pinned.hidden[1][: len(pinned.hidden[step])])
        torch.testing.assert_close(rms(pinned.hidden[step]), size)
        assert not torch.allclose(rms(free.hidden[step]), size, rtol=0.05)
    direction = torch.nn.functional.cosine_similarity(pinned.hidden[2], free.hidden[2], dim=-1)
    torch.testing.assert_close(direction, torch.ones_like(direction))


def test_own_tokens_are_those_of_a_naive_drafter_left_alone() -> None:
    target = make_target()
    drafter, trace = drafter_of(11), trace_of(11)
    own = OwnTokens(drafter.model, len(trace.ids) - 1)
    (scores,) = drafter.score([trace], ScoreRequest(depth=3, full_chains=True), probe=own, perturb=own)
    weights = {n: p.detach().double() for n, p in drafter.model.state_dict().items()}
    head = weights["lm_head.weight"]
    naive = Naive(drafter.model.config, weights, target.embed.double(), head, (0, 0))
    taps = [trace.taps[t].double() for t in drafter.info.taps]
    answer = list(trace.answer_ids)
    ids = drafter.model.target_ids.tolist()
    for s in range(ANSWER - 1):
        steps = naive.chain(list(trace.ids), taps, PROMPT + s, 3, None, ids)
        for i, logits in enumerate(steps, start=1):
            expected = int(ids[int(logits.argmax())] == answer[s + i]) if s + i < ANSWER else -1
            assert int(scores.forced[s, i - 1]) == expected, (s, i)


def test_one_chain_position_by_position() -> None:
    drafter, trace = drafter_of(2), trace_of(2)
    row = PROMPT + 1
    chain = Chain(trace, row, DEPTH)
    drafter.score([trace], ScoreRequest(depth=6, full_chains=True), probe=chain)
    assert [len(m) for m in chain.mass] == [row + step for step in range(1, DEPTH + 1)]
    for mass, weights in zip(chain.mass, materialised(drafter, trace, row, DEPTH), strict=True):
        torch.testing.assert_close(mass.double(), weights.mean(0), atol=2e-5, rtol=1e-3)


# ---- the whole job


def run(out: Path, count: int = 6, **changes: Any) -> Job:
    target = make_target()
    drafters = {
        "<b>pre</b>": drafter_of(1, feedback="pre"),
        "post": drafter_of(1, feedback="post", norm_per_tap=True, windows=(9,), sink="bos"),
    }
    traces = [trace_of(i, answer=20) for i in range(count)]
    source = Source(
        weights=target,
        taps_of=lambda _drafters: iter(traces),
        decode=lambda ids: f"</script>{ids[0]}",
        num_answers=count,
        description={"target": "toy"},
    )
    settings = {"depth": 3, "deep": 5, "alphas": (0.5,), "seeds": 2, "windows": (6, 8), "per_head": True}
    measures = Measures(**(settings | changes))
    with DiagnosisWriter(out) as writer:
        job = Job(drafters, source, measures, writer, seed=0)
        for i in range(0, count, 2):
            job.take(traces[i : i + 2])
        record = {
            "made": "now",
            "config": RunConfig().to_json(),
            "measures": {"depth": measures.depth, "deep": measures.deep},
            "versions": {"specbench": "0"},
            "target": {"name": "toy"},
            "num_prompts": len(job.prompts),
            "num_answers": job.answers,
            "largest_deviation": job.deviation,
            "drafters": [
                {
                    "name": name,
                    "fingerprint": "f",
                    "settings": dict(d.info.settings),
                    "trained_depth": 2,
                    "max_positions": 24,
                    "num_parameters": 1,
                    "taps": list(d.info.taps),
                    "notes": ["<i>odd</i>"],
                    "sink": {"position": 0, "share": 0.4, "found": True},
                }
                for name, d in drafters.items()
            ],
        }
        writer.finish(record)
    return job


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diagnosis") / "diag"
    run(out)
    return out


def test_tables_hold_what_replay_says(diagnosis: Path) -> None:
    rows = pq.read_table(diagnosis / "acceptance.parquet").to_pylist()
    parts = {(r["drafter"], r["part"], r["arm"]) for r in rows}
    for name in ("<b>pre</b>", "post"):
        assert {a for d, p, a in parts if d == name and p == "noise"} == {"hidden 0.5", "embed 0.5"}
        arms = {a for d, p, a in parts if d == name and p == "window"}
        assert {"full", "6 none absolute", "6 bos repacked", "8 system absolute"} <= arms
    drafter = drafter_of(1, feedback="pre")
    for row in rows:
        if row["drafter"] != "<b>pre</b>" or row["part"] not in ("base", "clean"):
            continue
        depth = {"base": 3, "clean": 5}[row["part"]]
        trace = trace_of(int(row["prompt_id"].split("/")[1]), answer=20)
        (scores,) = drafter.score([trace], ScoreRequest(depth=depth))
        s, counts = 0, []
        while s < 19:
            counts.append(int(scores.accepted[s]))
            s += counts[-1] + 1
        assert row["at_least"] == [sum(c >= i for c in counts) for i in range(depth + 1)]
    # a window that sees everything is no window; sinks do not matter then
    window = {r["arm"]: r["at_least"] for r in rows if r["part"] == "window" and r["prompt_id"] == "toy/0"}
    assert window["full"][0] > 0
    forced = pq.read_table(diagnosis / "depth.parquet").to_pylist()
    first = {(r["drafter"], r["prompt_id"], r["feeding"]): r["hits"] for r in forced if r["step"] == 1}
    assert all(first[d, p, "own"] == hits for (d, p, f), hits in first.items() if f == "target")
    heads = pq.read_table(diagnosis / "attention_heads.parquet").to_pylist()
    means = pq.read_table(diagnosis / "attention.parquet").to_pylist()
    wanted = {"drafter": "post", "prompt_id": "toy/1", "step": 2, "measure": "sink", "arm": "plain"}
    pick = [r for r in heads if all(r[k] == v for k, v in wanted.items())]
    (mean,) = [r for r in means if all(r[k] == v for k, v in wanted.items())]
    assert len(pick) == 4 and np.mean([r["value"] for r in pick]) == pytest.approx(mean["value"], rel=1e-5)


def test_window_arms_equal_drafters_made_with_the_window(diagnosis: Path) -> None:
    """Though chains inside their first window are not run again."""
    rows = pq.read_table(diagnosis / "acceptance.parquet").to_pylist()
    rows = [r for r in rows if r["part"] == "window" and r["prompt_id"] == "toy/2"]
    assert len({r["arm"] for r in rows}) == 15
    post = {"feedback": "post", "norm_per_tap": True}
    for row in rows:
        switches = {"windows": (row["window"],) if row["window"] else (), "sink": row["sink"]}
        switches |= {
            "positions": row["positions"],
            **(post if row["drafter"] == "post" else {"feedback": "pre"}),
        }
        drafter = drafter_of(1, **switches)
        (scores,) = drafter.score([trace_of(2, answer=20)], ScoreRequest(depth=3))
        counts = [r.num_accepted for r in walk_rounds(scores, 20, 3)]
        assert row["at_least"] == [sum(c >= i for c in counts) for i in range(4)], row["arm"]


def test_threads_change_nothing(diagnosis: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(tmp_path / "threads")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for table in ("magnitudes", "attention", "depth", "acceptance", "lengths", "chain"):
        threads = pq.read_table(tmp_path / "threads" / f"{table}.parquet").to_pylist()
        for got, want in zip(threads, pq.read_table(diagnosis / f"{table}.parquet").to_pylist(), strict=True):
            floats = {k for k, v in want.items() if isinstance(v, float)}
            assert {k: got[k] for k in got.keys() - floats} == {k: want[k] for k in want.keys() - floats}
            for k in floats:
                assert got[k] == pytest.approx(want[k], rel=1e-4, abs=1e-6)


def test_summary_numbers_follow_from_the_tables(diagnosis: Path) -> None:
    summary = summarise(diagnosis, draws=500)
    sizes = pq.read_table(diagnosis / "magnitudes.parquet").to_pylist()

    def mean(name: str, step: int) -> float:
        rows = [
            r
            for r in sizes
            if (r["drafter"], r["arm"], r["quantity"], r["step"]) == (name, "plain", "raw", step)
        ]
        return float(np.mean([r["rms"] for r in rows]))

    for name in summary.drafters:
        drift = summary.drift[name]
        assert drift["growth_raw"].value == pytest.approx(mean(name, 3) / mean(name, 1))
        logs = np.log([mean(name, i) for i in (1, 2, 3)])
        assert drift["slope_raw"].value == pytest.approx(np.polyfit([1, 2, 3], logs, 1)[0])
        rows = [
            r
            for r in pq.read_table(diagnosis / "attention.parquet").to_pylist()
            if (r["drafter"], r["arm"], r["measure"]) == (name, "plain", "sink")
        ]
        levels = {s: np.mean([r["value"] for r in rows if r["step"] == s]) for s in (1, 3)}
        assert drift["D_sink"].value == pytest.approx(levels[1] - levels[3])
        control = np.mean([r["control"] for r in rows if r["step"] == 3])
        assert drift["D_sink_net"].value == pytest.approx(control - levels[3])
        assert drift["D_sink"].low <= drift["D_sink"].value <= drift["D_sink"].high
    post, pre = summary.drift["post"], summary.drift["<b>pre</b>"]
    by_score = {row["score"]: row for row in summary.contrasts}
    difference = post["growth_fed_back"].value - pre["growth_fed_back"].value
    assert by_score["growth"]["value"] == pytest.approx(difference)
    assert by_score["D_sink"]["value"] == pytest.approx(post["D_sink"].value - pre["D_sink"].value)
    assert set(by_score) == {"growth", "D_sink", "retention_hidden_0.5"}


def test_page_is_whole_offline_and_escaped(diagnosis: Path) -> None:
    report = write_report(diagnosis, draws=500)
    text = report.path.read_text()
    assert set(report.figures) == {"chain", "shares", "norms", "rates", "noise", "lengths", "windows"}
    assert text.count("<img") == len(report.figures)
    for data in re.findall(r'src="data:image/png;base64,([^"]+)"', text):
        assert base64.b64decode(data).startswith(b"\x89PNG")
    # nothing is fetched, and nothing that came from outside is markup
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "http://" not in text and "@import" not in text
    assert "<b>pre" not in text and "<i>odd" not in text and "</script>" not in text
    assert "&lt;b&gt;pre&lt;/b&gt;" in text
    assert text.index(report.verdict[0].replace("<", "&lt;").replace(">", "&gt;")) < text.index("<img")
    for name in report.figures:
        for form in ("svg", "png", "csv"):
            assert (diagnosis / "figures" / f"{name}.{form}").stat().st_size > 0
    assert "Every query's shares sum to 1 within" in text.replace("&#x27;", "'")


def test_one_group_or_many_give_the_same_numbers(diagnosis: Path, tmp_path: Path) -> None:
    """Answers are looked at one by one: what shares a group with them changes nothing but the noise drawn."""
    run(tmp_path / "again", count=4)
    for table in ("magnitudes", "attention", "depth", "lengths"):
        few = pq.read_table(tmp_path / "again" / f"{table}.parquet").to_pylist()
        many = pq.read_table(diagnosis / f"{table}.parquet").to_pylist()
        wanted = {f"toy/{i}" for i in range(4)}
        assert few == [r for r in many if r["prompt_id"] in wanted]


def test_value_words() -> None:
    value = Value(value=0.2, low=0.1, high=0.3)
    assert value.text() == "0.20 [0.10, 0.30]" and value.above(0.05) and not value.below(0.2)
    assert Value(value=1.0, low=float("nan"), high=float("nan")).text() == "1.00"


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="drift needs steps to compare"):
        Measures(depth=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match="not empty and holds no diagnosis"):
        DiagnosisWriter(tmp_path / "other")
    with pytest.raises(UserError, match="make one with"):
        summarise(tmp_path)
    with DiagnosisWriter(tmp_path / "begun"):
        pass
    with pytest.raises(UserError, match="did not finish"):
        summarise(tmp_path / "begun")
    with pytest.raises(UserError, match="hold no states to look into"):
        load_drafters(RunConfig(drafter="ngram"), make_target())


def test_the_command(tiny_target_path: Path, tmp_path: Path) -> None:
    """Prompts, target, two turns, tables, figures and page: on a random target and a random drafter."""
    from specbench.cli.diagnose import diagnose
    from specbench.drafters.checkpoints.save import save_drafter
    from specbench.drafters.eagle3 import Eagle3Config, Eagle3Model
    from specbench.runners.targets import Target

    weights = Target.load(str(tiny_target_path), device="cpu", dtype="float32").weights()
    sizes = {"intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    model = Eagle3Model(Eagle3Config.for_target(weights.info, **sizes), weights)
    model.init_weights(torch.Generator().manual_seed(0))
    save_drafter(model, tmp_path / "drafter")
    prompts = [{"id": f"p{i}", "turns": [f"Say {i}.", "And again?"]} for i in range(3)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    arguments = ["--drafter", str(tmp_path / "drafter"), "--target", str(tiny_target_path), "--device", "cpu"]
    arguments += [
        "--suite",
        str(tmp_path / "own.jsonl"),
        "--max-new-tokens",
        "14",
        "--depth",
        "3",
        "--deep",
        "4",
    ]
    arguments += ["--alphas", "0.5", "--seeds", "1", "--windows", "32", "--out", str(tmp_path / "diag")]
    result = CliRunner().invoke(diagnose, arguments, standalone_mode=False, catch_exceptions=False)
    assert result.return_value == 0
    assert "draft tokens per round" in result.stdout and (tmp_path / "diag" / "report.html").is_file()
    rows = pq.read_table(tmp_path / "diag" / "depth.parquet").to_pylist()
    assert {r["turn"] for r in rows} == {0, 1} and len({r["prompt_id"] for r in rows}) == 3


def test_draw_makes_no_empty_figures(diagnosis: Path, tmp_path: Path) -> None:
    summary = summarise(diagnosis, draws=200)
    for name in ("chain", "shares", "norms", "rates", "windows"):
        setattr(summary, name, [])
    figures = draw(summary, tmp_path / "figures")
    assert [f.name for f in figures] == ["noise", "lengths"]
    assert not (tmp_path / "figures" / "windows.png").exists()
    assert "windows.csv" not in page(summary, ["one"], figures, tmp_path / "figures")
