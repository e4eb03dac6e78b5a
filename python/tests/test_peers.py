"""bench/peers without a GPU, torch or a peer: its cells, its loop over arms that are not real, its report, its command."""

import csv
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
if not (ROOT / "bench/peers/cells.py").is_file():
    pytest.skip("bench/peers is not here: it is not part of the wheel", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from bench.peers import __main__ as command  # noqa: E402
from bench.peers import cells, device, measure, report  # noqa: E402
from bench.peers.arm import Arm, NotServed, Unavailable  # noqa: E402
from bench.peers.floor_arms import Numpy  # noqa: E402

PAGE = cells.PAGE


def cell_of(text, name="mine", heads=(4, 2, 16)):
    return cells.Cell(name, *heads, cells.parse(text))


# cells


def test_standard_cells():
    by_name = {cell.name: cell for cell in cells.standard()}
    assert len(by_name) == len(cells.standard()) == 48
    assert sum(cell.is_shared for cell in by_name.values()) == 44
    assert {name for name, cell in by_name.items() if not cell.is_shared} == {n for n in by_name if n.startswith("flat_")}
    two = by_name["2lv_B4_P512_U256"]
    assert (two.num_requests, two.lengths, two.token_bytes) == (4, [768] * 4, 4096)
    assert two.distinct_bytes == (512 + 4 * 256) * 4096 and two.flat_bytes == 4 * 768 * 4096
    assert two.flops == 4 * 128 * 32 * 4 * 768
    assert by_name["groups_2x32xP4096+16xL2048"].lengths == [4352] * 64 + [2048] * 16
    assert by_name["bin5_512"].num_requests == 32 and set(by_name["bin5_512"].lengths) == {6 * 512}
    assert by_name["h8-1_B8_P4000_U64"].num_kv_heads == 1 and by_name["d64_B64_P4096_U256"].head_dim == 64


def test_notation_says_the_same_forest():
    for cell in cells.standard():
        name, *numbers = cells.notation(cell).split()
        heads, count, nodes = numbers[:3], int(numbers[3]), list(map(int, numbers[4:]))
        assert (name, len(nodes)) == (cell.name, 2 * count)
        again = cells.Cell(name, *map(int, heads), cells.Forest(tuple(nodes[::2]), tuple(nodes[1::2])))
        assert again == cell


@pytest.mark.parametrize("text", ["16[", "16]", "16*", "x", "17[3]", "16[0]"])
def test_forest_refuses(text):
    with pytest.raises(ValueError):
        cells.parse(text)


def rebuilt(tables, count, requests):
    """Pages of each request, put together from `count` levels again."""
    out = [[] for _ in range(requests)]
    for qo_indptr, indptr, indices, last in tables.levels(count):
        assert len(indptr) == len(qo_indptr) == len(last) + 1 and qo_indptr[-1] == requests
        for i, (begin, end) in enumerate(zip(qo_indptr, qo_indptr[1:])):
            assert (last[i] == 0) == (indptr[i] == indptr[i + 1])
            for row in range(begin, end):
                out[row] += indices[indptr[i] : indptr[i + 1]]
    return out


def test_levels_put_together_are_the_requests():
    for cell in cells.standard():
        small = cell.shrunk(64)
        tables = cells.Tables(small)
        assert len(set(tables.distinct)) == len(tables.distinct) < tables.num_pages
        for count in range(1, tables.depth + 1):
            assert rebuilt(tables, count, small.num_requests) == tables.requests, (cell.name, count)


def test_common_pages():
    assert cells.Tables(cell_of("64[5*3]")).common_pages() == 4
    assert cells.Tables(cell_of("64[5*3] 64[5]")).common_pages() == 0
    assert cells.Tables(cell_of("64[32[1*2] 3]")).common_pages() == 4


# the loop


class Wrong(Numpy):
    def call(self, copy):
        return super().call(copy) * 1.02


class NotANumber(Numpy):
    def call(self, copy):
        out = super().call(copy)
        out[-1, 0, 0] = float("nan")
        return out


class Elsewhere(Numpy):
    def path(self):
        raise AssertionError("path cascade, expected flat")


class FailsLater(Numpy):
    """Plans once; planning is timed after the rounds."""

    planned = 0

    def plan(self):
        self.planned += 1
        if self.planned > 1:
            raise RuntimeError("no second plan")


class Missing(Arm):
    def __init__(self):
        raise Unavailable("its library is not here")


class Declines(Numpy):
    def prepare(self, inputs):
        raise NotServed("not for this cell")


def measured(arms, **more):
    settings = dict(rounds=8, seconds=60, product_rate=1e11, run="now") | more
    return {row["arm"]: row for row in measure.measure(cell_of("64[20*3]"), arms, device.Host(), **settings)}


def test_every_arm_has_a_row_and_one_failure_stops_no_other():
    arms = dict(
        wrong=Wrong, nan=NotANumber, elsewhere=Elsewhere, later=FailsLater, missing=Missing, declines=Declines, right=Numpy
    )
    rows = measured(arms)
    assert list(rows) == list(arms)
    assert {name: row["status"] for name, row in rows.items()} == dict(
        wrong="failed", nan="failed", elsewhere="failed", later="failed", missing="not run", declines="not served", right="ok"
    )
    assert "WRONG RESULT" in rows["wrong"]["reason"] and "WRONG RESULT" in rows["nan"]["reason"]
    assert "expected flat" in rows["elsewhere"]["reason"] and "no second plan" in rows["later"]["reason"]
    assert all(row["median_us"] == "" for row in rows.values() if row["status"] != "ok")
    right = rows["right"]
    assert set(right) == set(measure.COLUMNS)
    assert 0 < right["min_us"] <= right["p10_us"] <= right["median_us"] <= right["p90_us"]
    assert (right["rounds"], right["calls"], right["out_error"] < 1e-3) == (8, 2, True)


def test_rounds_take_turns(monkeypatch):
    orders = []

    def spy(self, graphs):
        orders.append([names[id(graph)] for graph in graphs])
        return [float(len(orders))] * len(graphs)

    names = {}
    capture = device.Host.capture

    def named(self, calls):
        graph = capture(self, calls)
        names[id(graph)] = "ab"[len(names)]
        return graph

    monkeypatch.setattr(device.Host, "capture", named)
    monkeypatch.setattr(device.Host, "round", spy)
    rows = measured(dict(a=Numpy, b=Numpy))
    assert orders == [["a", "b"], *[["a", "b"], ["b", "a"]] * 4]
    assert rows["a"]["median_us"] == 5.5  # of 2 to 9: the first round is not counted


def test_rounds_end_early_but_not_before_the_least():
    assert measured(dict(a=Numpy), rounds=50, seconds=0)["a"]["rounds"] == measure.LEAST_ROUNDS


# the report


def row(cell, arm, us="", *, library="peer", status="ok", shared=1, run="1", reason=""):
    """As it is read from a file."""
    values = dict(cell=cell, arm=arm, library=library, status=status, reason=reason, shared=str(shared), run=run, device="gpu")
    values |= dict(median_us=us, p10_us=us, p90_us=us, plan_us="5", plan_on="host", products_us="2", version="1")
    return dict.fromkeys(measure.COLUMNS, "") | {key: str(value) for key, value in values.items()}


ROWS = [
    row("a", "read_once", 1, library="floor"), row("a", "hw_auto", 8, library="headwater"), row("a", "p", 4), row("a", "q", 5),
    row("b", "read_once", 4, library="floor"), row("b", "hw_auto", 8, library="headwater"), row("b", "p", 16),
    row("b", "q", status="failed", reason="broke"),
    row("c", "read_once", 6, library="floor", shared=0), row("c", "hw_auto", 9, library="headwater", shared=0),
    row("c", "p", 10, shared=0), row("c", "q", status="not run", shared=0, reason="absent"),
]  # fmt: skip


def test_report():
    lines = report.markdown(ROWS).splitlines()
    assert "| a | 2.0 | 1.0 | 8.0 | 4.0 | 5.0 | p | **2.00** |" in lines  # the products are the limit
    assert "| b | 4.0 | 4.0 | 8.0 | 16.0 | - | p | 0.50 |" in lines
    assert "| shared | hw_auto | 2 of 2 | 2.83 | 1.000 |" in lines  # sqrt(8/2 * 8/4), sqrt(8/4 * 8/16)
    assert "| shared | q | 1 of 2 | 2.50 | 1.250 |" in lines
    assert "| unshared | hw_auto | 1 of 1 | 1.50 | 0.900 |" in lines
    assert "`hw_auto` loses 1 of 3 cells: a 2.00x of p." in lines
    assert lines[-2:] == ["- FAILED q (b): broke", "- NOT RUN q (c): absent"]
    assert "1 run." in lines[0] and "headwater 1, peer 1" in lines[0]


def test_report_without_the_read_kernel_has_no_limit():
    lines = report.markdown([r for r in ROWS if r["arm"] != "read_once"]).splitlines()
    assert "| a | - | 8.0 | 4.0 | 5.0 | p | **2.00** |" in lines
    assert "| shared | hw_auto | 2 of 2 | - | 1.000 |" in lines


def test_report_sets_only_times_of_one_run_side_by_side():
    lines = report.markdown([*ROWS, row("a", "p", 20, run="2")]).splitlines()
    assert "| a | - | - | - | 20.0 | - | - |" in lines
    assert "`hw_auto` loses none of 2 cells." in lines


# the command


class Here(Numpy):
    made = 0

    def prepare(self, inputs):
        type(self).made += 1
        super().prepare(inputs)


def run(monkeypatch, *argv, arms=None):
    Here.made = 0
    monkeypatch.setattr(command, "DRY_ARMS", arms or dict(hw_auto=Here, numpy=Numpy))
    return command.main(["--dry-run", "--rounds", "7", "--cell-seconds", "0", *map(str, argv)])


def test_append_measures_what_the_file_lacks(monkeypatch, tmp_path, capsys):
    file = tmp_path / "out.csv"
    assert run(monkeypatch, "--cells", "tot_set*", "--csv", file, "--markdown", tmp_path / "out.md") == 0
    assert Here.made == 2 and "tot_set128_line51_t36" in (tmp_path / "out.md").read_text()
    before = file.read_text()
    assert run(monkeypatch, "--cells", "tot_set*,h8*", "--csv", file, "--append") == 0
    assert Here.made == 1 and file.read_text().startswith(before)
    with open(file, newline="") as opened:
        assert [r["cell"] for r in csv.DictReader(opened)].count("h8-1_B8_P4000_U64") == 2
    before = file.read_text()
    assert run(monkeypatch, "--cells", "tot_set*,h8*", "--csv", file, "--append") == 0
    assert Here.made == 0 and file.read_text() == before
    # A later run of one arm leaves the others of that cell behind: they are measured again.
    report.append(file, [dict.fromkeys(measure.COLUMNS, "") | dict(cell="h8-1_B8_P4000_U64", arm="numpy", run="other")])
    assert run(monkeypatch, "--cells", "tot_set*,h8*", "--csv", file, "--append") == 0
    assert Here.made == 1
    assert "3 cells" in capsys.readouterr().out


def test_exit_status(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, "--cells", "h8*", arms=dict(hw_auto=Wrong)) == 1
    assert run(monkeypatch, "--cells", "h8*", arms=dict(hw_auto=Missing)) == 0
    assert run(monkeypatch, "--cells", "h8*", "--seconds", "1e-9") == 3
    assert Here.made == 0
    assert "time is up before h8-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--cells", "nope"], "--cells nope: there is no such name"),
        (["--arms", "nope"], "--arms nope: there is no such name"),
        (["--forest", "3[2]"], "node 0 has 3 tokens"),
        (["--forest", "32", "--heads", "3/2/64"], "--heads 3/2/64"),
        (["--rounds", "6"], "--rounds 6, expected at least 7"),
        (["--csv", "HERE/there.csv"], "exists: --append"),
        (["--csv", "HERE/no/such.csv"], "there is no such folder"),
        (["--report", "HERE/missing.csv"], "missing.csv"),
        (["--report", "HERE/there.csv"], "expected ['cell'"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_arguments_are_status_2(argv, words, tmp_path, capsys):
    (tmp_path / "there.csv").write_text("a,b\n1,2\n")
    argv = ["--dry-run", *(word.replace("HERE", str(tmp_path)) for word in argv)]
    try:
        status = command.main(argv)
    except SystemExit as error:  # argparse's own
        status = error.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_list_is_one_line_a_cell(capsys):
    assert command.main(["--list", "--cells", "flat_*"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "flat_B1_L32768 32 8 128 1 -1 32768"
