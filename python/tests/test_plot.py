"""headwater.plot: what is drawn says what the plan says, nothing overlaps, nothing of matplotlib's state changes."""

import json
import subprocess
import sys

import numpy as np
import pytest

import headwater
from conftest import make_case

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: python/tests/requirements.txt")

import headwater.plot as plot  # noqa: E402
from headwater.plot.__main__ import main  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

CELL = dict(
    workload="1,8|2048,64", batch=8, dtype="f16", kv_dtype="f16", num_qo_heads=8, num_kv_heads=2, head_dim_qk=64,
    isa="avx2", device="cpu", limit_us=180.0,
)  # fmt: skip
BENCH = [
    CELL | dict(policy="flat", median_us=1640.0, speedup=1.0),
    CELL | dict(policy="auto", median_us=677.0, speedup=1.89),
    CELL | dict(policy="flat", median_us=90000.0, speedup=1.0, kv_dtype="f8e4m3"),
    CELL | dict(policy="auto", median_us=20000.0, speedup=4.5, kv_dtype="f8e4m3"),
    dict(workload="1,8|2048,64", gate="no_sharing_overhead", verdict="passed"),
]
SERVING = dict(
    model="a-model", shared_prefix_tokens=1024, prompt_tokens=16,
    levels=[
        dict(concurrency=n, cascade=arm, ok=n, aggregate_tps=10.0 * n, ttft_mean_s=0.1 * n, ttft_p95_s=0.2 * n)
        for n in (1, 4, 16)
        for arm in ("on", "off")
    ],
)  # fmt: skip


def plan_of(case, **options):
    return headwater.Planner().plan(case.shape, case.batch(), headwater.PlanOptions(**options))


def blocks(ax):
    return [p for p in ax.patches if isinstance(p, Rectangle)]


def texts_drawn(ax):
    """What drawing the axes' figure writes, and where, in pixels."""
    found = []
    draw = matplotlib.text.Text.draw

    def record(text, renderer):
        draw(text, renderer)
        if text.get_text() and text.get_visible():
            found.append((text.get_text(), text.get_window_extent(renderer)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.text.Text, "draw", record)
        FigureCanvasAgg(ax.figure).draw()
    return found


def assert_nothing_overlaps(ax):
    drawn = texts_drawn(ax)
    assert drawn
    whole = ax.figure.bbox
    for i, (text, box) in enumerate(drawn):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, text
        for other, its in drawn[:i]:
            assert not (box.x0 < its.x1 and its.x0 < box.x1 and box.y0 < its.y1 and its.y0 < box.y1), (text, other)


def test_forest_draws_shared_spans_once_across_their_members():
    case = make_case(groups=(4, 3), shared_pages=(600, 400), own_tokens=(500, 90, 100, 160))
    ax = plot.forest(plan_of(case, policy="forest"))
    drawn = {(round(b.get_x()), round(b.get_width()), round(b.get_height())) for b in blocks(ax)}
    assert {(0, 2400, 4), (0, 1600, 3), (2400, 500, 1), (1600, 500, 1)} <= drawn
    assert len(blocks(ax)) == 2 + 7
    lanes = sorted(round(b.get_y() - 0.06) for b in blocks(ax) if round(b.get_height()) == 1)
    assert lanes == list(range(7))  # one each
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["shared, read once", "own"]
    assert "7 requests, 2 shared spans; cascade" in ax.get_title(loc="left")
    assert "2400 tokens of 4" in [text for text, _ in texts_drawn(ax)]
    assert_nothing_overlaps(ax)


def test_forest_of_page_tables_shows_the_sharing_alone():
    case = make_case(groups=(4, 3), shared_pages=(1, 1))  # too little to pay
    ax = plot.forest(case.batch())
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["shared", "own"]
    assert ax.get_title(loc="left") == "7 requests, 2 shared spans"
    flat = plot.forest(plan_of(case, policy="flat"))
    assert [t.get_text() for t in flat.get_legend().get_texts()] == ["shared, read apart", "own"]


def test_forest_draws_on_the_axes_that_it_is_given_and_leaves_out_what_does_not_fit():
    figure = Figure(figsize=(2, 1.4))
    ax = figure.subplots()
    case = make_case(groups=(40,), shared_pages=(30,))
    assert plot.forest(plan_of(case), ax) is ax and ax.figure is figure
    names = [text for text, _ in texts_drawn(ax)]
    assert "120 tokens of 40" in names
    assert not {"5", "9", "5 tokens", "9 tokens"} & set(names)  # lanes are a pixel or two high


def test_requests_without_tokens_have_a_lane():
    ints = lambda *x: np.array(x, dtype=np.int32)  # noqa: E731
    batch = headwater.Batch(ints(0, 1, 2), ints(0, 0, 2), ints(0, 1), ints(0, 3), page_size=4, num_pages=2)
    ax = plot.forest(batch)
    assert len(blocks(ax)) == 1 and sorted(t.get_text() for t in ax.get_yticklabels()) == ["0", "1"]


@pytest.mark.parametrize("policy", ["auto", "forest", "two_level", "vllm", "flat"])
@pytest.mark.parametrize("by", ["level", "span"])
def test_bytes_add_up_to_what_the_plan_counts(policy, by):
    rng = np.random.default_rng(7)
    for seed in range(8):
        groups = tuple(int(n) for n in rng.integers(1, 9, size=3))
        case = make_case(groups=groups, shared_pages=tuple(int(n) for n in rng.integers(0, 60, size=3)), seed=seed)
        plan = plan_of(case, policy=policy)
        ax = plot.kv_bytes(plan, by=by)
        widths = [bar.get_width() for bar in blocks(ax)]
        flat, read = widths[0::2], widths[1::2]
        assert (flat[-1], read[-1]) == (plan.stats.kv_bytes_flat, plan.stats.kv_bytes_read)
        assert (sum(flat[:-1]), sum(read[:-1])) == (flat[-1], read[-1])
        if policy != "flat" and flat != read:
            assert any(a > b for a, b in zip(flat, read))
    assert_nothing_overlaps(ax)


def test_bytes_of_many_spans_are_one_row():
    case = make_case(groups=(2,) * 9, shared_pages=(4,) * 9)
    ax = plot.kv_bytes(plan_of(case, policy="forest"), by="span", most=3)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names[3:] == ["6 more spans", "own tokens", "whole plan"] and names[0] == "tokens 0..16 of 2 requests"


def test_the_json_form_and_its_file_are_the_plan(tmp_path, case):
    plan = plan_of(case)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    titles = {plot.forest(x).get_title(loc="left") for x in (plan, json.loads(plan.to_json()), path, str(path))}
    assert len(titles) == 1


def test_bench_has_a_bar_for_each_policy_and_the_limit():
    ax = plot.bench(BENCH)
    assert [bar.get_width() for bar in blocks(ax)] == [1640.0, 677.0, 90000.0, 20000.0]
    assert [line.get_xdata()[0] for line in ax.lines] == [180.0] * 4
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1,8|2048,64\n8/2/64 f16", "1,8|2048,64\n8/2/64 f16, KV f8e4m3"]
    assert {"677 us, 1.89x", "90 ms"} <= {text for text, _ in texts_drawn(ax)}
    assert_nothing_overlaps(ax)


@pytest.mark.parametrize("value, lines", [("throughput", 2), ("ttft", 4)])
def test_serving_has_a_line_for_each_arm(value, lines):
    ax = plot.serving(SERVING, value=value)
    assert len(ax.lines) == lines and all(list(line.get_xdata()) == [1, 4, 16] for line in ax.lines)
    if value == "throughput":
        assert list(ax.lines[0].get_ydata()) == [10.0, 40.0, 160.0]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["cascade on", "cascade off"]
    assert_nothing_overlaps(ax)
    alone = {**SERVING, "levels": [{k: v for k, v in x.items() if k != "cascade"} for x in SERVING["levels"][::2]]}
    assert plot.serving(alone).get_legend() is None


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: plot.forest({}), "expected a Plan, a Batch or the JSON form"),
        (lambda: plot.forest(7), "plan is of type int, expected a path"),
        (lambda: plot.forest(plan_of(make_case(), cascade="off")), 'expected a plan with cascade "auto" or "on"'),
        (lambda: plot.kv_bytes(make_case().batch()), "plan is a Batch, expected a Plan"),
        (lambda: plot.kv_bytes(plan_of(make_case()), by="page"), 'by = "page", expected "level" or "span"'),
        (lambda: plot.bench(SERVING), "results is an object, expected the array"),
        (lambda: plot.bench([{"gate": "x"}]), "results has no entry with median_us"),
        (lambda: plot.serving(BENCH), "results has no levels"),
        (lambda: plot.serving(SERVING, value="speed"), 'value = "speed", expected "throughput" or "ttft"'),
    ],
)
def test_other_input_is_refused_by_name(call, match):
    with pytest.raises((ValueError, TypeError), match=match):
        call()


def test_nothing_global_changes(case):
    code = (
        "import sys, json, headwater.plot as plot, matplotlib\n"
        "params = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = params()\n"
        "plot.bench(json.loads(sys.argv[1])); plot.serving(json.loads(sys.argv[2])); plot.forest(json.loads(sys.argv[3]))\n"
        "print('matplotlib.pyplot' in sys.modules, params() == before)"
    )
    arguments = [json.dumps(BENCH), json.dumps(SERVING), plan_of(case).to_json()]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_without_matplotlib_the_error_says_what_to_install():
    code = "import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None; import headwater.plot"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'headwater[plot]'" in done.stderr.splitlines()[-1]


def test_pictures_of_files(tmp_path, case):
    inputs = {"forest": plan_of(case).to_json(), "bytes": plan_of(case).to_json(), "spans": plan_of(case).to_json()}
    inputs |= {"bench": json.dumps(BENCH), "serving": json.dumps(SERVING)}
    for kind, text in inputs.items():
        (tmp_path / kind).write_text(text)
        pictures = [tmp_path / f"{kind}{i}.svg" for i in range(2)]
        for picture in pictures:
            assert main([kind, str(tmp_path / kind), str(picture)]) == 0
        assert pictures[0].read_bytes() == pictures[1].read_bytes() and b"<svg" in pictures[0].read_bytes()
    assert main(["forest", str(tmp_path / "forest"), str(tmp_path / "forest.png")]) == 0
    assert (tmp_path / "forest.png").read_bytes().startswith(b"\x89PNG")


def test_the_module_reads_standard_input(tmp_path, case):
    command = [sys.executable, "-m", "headwater.plot", "forest", "-", str(tmp_path / "x.svg")]
    done = subprocess.run(command, input=plan_of(case).to_json(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"levels": [{}]}', None])
def test_files_that_cannot_be_drawn_end_with_2(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    assert main(["serving", str(tmp_path / "x.json"), str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err.startswith("headwater.plot: ") and not (tmp_path / "x.svg").exists()
