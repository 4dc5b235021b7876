"""The commands that show runs in a terminal."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import camshaft
from support.run_folders import make_run, sample_rows

from camshaft.data.tables import write_parquet
from camshaft.tracking.names import METRICS, matches
from camshaft.tracking.run_folder import RunFolder, find_runs
from camshaft.view.differences import differing_keys
from camshaft.view.panels import HEADLINES, ROWS
from camshaft.view.plot import draw
from camshaft.view.text import compare, printable, runs_table, show_step


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", steps=20)
    make_run(folder / "second", steps=30, changes={"actor_rollout_ref.actor.optim.lr": 1e-3}, ending="failed")
    return folder


def test_a_step_is_shown_by_group_with_the_most_different_first(runs: Path) -> None:
    shown = camshaft("show", str(runs / "first"), "--groups", "3", "--width", "100")
    assert shown.status == 0
    lines = shown.out.splitlines()
    assert lines[0] == "step 20: 12 responses in 3 groups, score 0.1667 (lowest 0, highest 1)"
    assert lines[1] == "cut at the length limit: 3; failed reward calls: 1; groups without signal: 1"
    heads = [line for line in lines if line.startswith("0/")]
    assert heads == ["0/0 (sums)  truth: 0", "0/1 (sums)  truth: 1", "0/2 (sums)  truth: 2"]
    assert lines[-1] == "  all scores are equal: no signal for a group-relative advantage"
    best, *others = [line.split() for line in lines[lines.index(heads[1]) + 3 :][:4]]
    assert best == ["1", "0.75", "8", "answer", "4"]
    assert [row[0] for row in others] == ["0"] * 3


def test_one_prompt_is_selected_by_its_uid(runs: Path) -> None:
    shown = camshaft("show", str(runs / "first"), "--step", "20", "--uid", "0/1")
    assert "question 1" in shown.out
    assert "question 0" not in shown.out
    assert "no response has the uid 7; uids of this step: 0/0, 0/1, 0/2" in show_step(
        RunFolder(runs / "first"), 20, 4, 100, uid="7"
    )


def test_responses_cannot_control_the_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "run", responses={1: sample_rows(text="a\x1b[2Jb\nc\u202e{row}\u00e9")})
    shown = show_step(RunFolder(tmp_path / "run"), 1, 3, 200)
    assert "a\\x1b[2Jb\\nc\\u202e4\u00e9" in shown
    rows = [row | {"uid": "\x1b[2J", "data_source": "\x1b[3J"} for row in sample_rows()]
    make_run(tmp_path / "ids", responses={1: rows})
    shown += show_step(RunFolder(tmp_path / "ids"), 1, 3, 200)
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert printable("plain") == "plain"


def test_long_lines_are_cut_at_the_width(tmp_path: Path) -> None:
    make_run(tmp_path / "run", responses={1: sample_rows(text="x" * 500)})
    assert max(map(len, show_step(RunFolder(tmp_path / "run"), 1, 3, 80).splitlines()[2:])) == 80


def test_a_run_without_responses_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    shown = camshaft("show", str(tmp_path))
    assert shown.status == 2
    assert "has no stored responses" in shown.err
    missing = camshaft("show", str(tmp_path / "missing"))
    assert missing.status == 1
    assert "is not a folder" in missing.err


def test_generated_responses_are_shown_with_their_prompts(tmp_path: Path) -> None:
    columns = {"answer": ["a\x1bb", "cc"], "answer_tokens": [2, 3], "answer_finished": [True, False]}
    inputs = {"is_finished": False}  # a column of the prompts
    rows = [
        {"prompt": f"p{number}", "level": number, **inputs, **columns, "answer_score": [0.5, 1.0]}
        for number in range(3)
    ]
    path = write_parquet(tmp_path / "responses.parquet", rows)
    text = camshaft("show", str(path), "--groups", "2", "--width", "400").out
    assert text.splitlines()[:8] == [
        f"{path}: 3 rows",
        "",
        "prompt: p0",
        "level: 0",
        "is_finished: False",
        "  score  tokens       answer",
        "  0.5    2            a\\x1bb",
        "  1      3       cut  cc",
    ]
    assert "p2" not in text
    assert "1 more rows; --groups 3 shows all" in text
    step = camshaft("show", str(path), "--step", "2")
    assert (step.status, "is a file without steps" in step.err) == (2, True)
    other = camshaft("show", str(write_parquet(tmp_path / "data.parquet", [{"prompt": "p"}])))
    assert (other.status, "it is not an output file of `camshaft generate`" in other.err) == (1, True)


def test_a_comparison_lists_config_state_and_metrics(runs: Path) -> None:
    shown = camshaft("compare", str(runs / "first"), str(runs / "second"))
    assert shown.status == 0
    rows = {line.split("  ")[0]: line.split() for line in shown.out.splitlines() if line}
    assert rows["state"] == ["state", "finished", "failed"]
    assert rows["actor_rollout_ref.actor.optim.lr"][1:] == ["1e-05", "0.001"]
    assert rows["metrics up to step 20"][-1] == "difference"
    score = f"{1 - 0.9**20:.4g}"
    assert rows["critic/score/mean"][1:] == [score, score, "+0"]
    assert differing_keys([RunFolder(runs / "first").config()] * 2) == {}


def test_any_number_of_runs_is_compared(runs: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "third", steps=10, changes={"actor_rollout_ref.actor.optim.lr": 1e-4, "only.here": 1})
    shown = camshaft("compare", str(runs), str(tmp_path / "third"))
    assert shown.status == 0
    rows = {line.split("  ")[0]: line.split() for line in shown.out.splitlines() if line}
    assert rows["config"][1:] == ["first", "second", "third"]
    assert rows["actor_rollout_ref.actor.optim.lr"][1:] == ["1e-05", "0.001", "0.0001"]
    assert "only.here" not in rows
    assert "1 keys are in the configs of some runs only (commands: ppo)." in shown.out
    assert rows["metrics up to step 10"][-3:] == ["first", "second", "third"]
    assert rows["critic/score/mean"][1:] == [f"{1 - 0.9**10:.4g}"] * 3
    one = camshaft("compare", str(runs / "first"))
    assert (one.status, "found 1 runs; name at least two" in one.err) == (2, True)


def test_the_table_of_runs_shows_the_keys_that_differ(runs: Path, tmp_path: Path) -> None:
    changes = {"trainer.seed": 7, "trainer.project_name": "sums"}
    make_run(tmp_path / "a", changes={**changes, "data.train_files": "/data/one/train.parquet"})
    make_run(tmp_path / "b", changes={**changes, "data.train_files": "/data/two/train.parquet"})
    make_run(tmp_path / "c", changes={**changes, "data.train_files": "/data/two/x.parquet", "trainer.seed": 8})
    lines = runs_table(find_runs(tmp_path), now=0.0).splitlines()
    assert lines[0].split()[:4] == ["run", "data", "seed", "state"]
    assert [line.split()[1:3] for line in lines[1:]] == [
        ["/data/one/train.parquet", "7"],
        ["/data/two/train.parquet", "7"],
        ["/data/two/x.parquet", "8"],
    ]
    header = runs_table(find_runs(runs), now=0.0).splitlines()[0]
    assert header.split()[:3] == ["run", "lr", "state"]


def test_keys_of_roles_that_neither_run_has_are_not_compared(tmp_path: Path) -> None:
    def run(name: str, estimator: str, **keys: object) -> RunFolder:
        models = {f"{role}.model.path": name for role in ("critic", "reward_model")}
        changes = {"algorithm.adv_estimator": estimator, "reward_model.enable": False, **models, **keys}
        return RunFolder(make_run(tmp_path / name, steps=1, changes=changes))

    grpo, rloo, ppo = run("a", "grpo"), run("b", "rloo"), run("c", "gae")
    assert list(differing_keys([grpo.config(), rloo.config()])) == ["algorithm.adv_estimator"]
    assert list(differing_keys([grpo.config(), ppo.config()])) == ["algorithm.adv_estimator", "critic.model.path"]
    scored = run("d", "grpo", **{"reward_model.enable": True})
    assert list(differing_keys([grpo.config(), scored.config()])) == ["reward_model.enable", "reward_model.model.path"]


def test_runs_without_a_common_step_are_compared_by_config(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    for number, run in enumerate(runs, start=1):
        run.mkdir()
        (run / "metrics.jsonl").write_text(f'{{"step": {number}, "critic/score/mean": 1}}\n')
    shown = compare(*map(RunFolder, runs))
    assert "The first run has no run.json with its config." in shown
    assert shown.endswith("The runs have no step in common.")


def test_the_table_of_runs_tells_a_killed_one(runs: Path, tmp_path: Path) -> None:
    killed = RunFolder(make_run(tmp_path / "killed", ending=None))
    killed.info = lambda: {"status": "running", "host": "here", "pid": 1, "total_steps": 50}
    killed.state = lambda: "killed"
    lines = runs_table([RunFolder(runs / "first"), killed], now=0.0).splitlines()
    assert lines[1].split()[1:] == ["finished", "20/20", "0.8784"]
    assert lines[2].split()[1:] == ["killed", "20/50", "0.8784"]


def test_the_table_of_runs_names_the_metric_of_each_run(runs: Path, tmp_path: Path) -> None:
    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n', encoding="utf-8")
    header, line = runs_table([RunFolder(sft)], now=0.0).splitlines()
    assert (header.split()[5:], line.split()[-1]) == (["loss", "validation"], "2.5")
    header, *lines = runs_table([RunFolder(sft), RunFolder(runs / "first")], now=0.0).splitlines()
    assert "loss or reward" in header
    assert [line.split()[-2:] for line in lines] == [["loss", "2.5"], ["reward", "0.8784"]]


def test_a_plot_has_a_chart_per_panel_and_a_curve_per_run(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "curves.png"
    shown = camshaft("plot", str(runs), "--out", str(out))
    assert shown.out == f"wrote {out}: 13 charts of 2 runs\n"
    assert out.read_bytes().startswith(b"\x89PNG")
    one = camshaft("plot", str(runs), "--out", str(out), "--metric", "actor/entropy")
    assert one.out == f"wrote {out}: 1 chart of 2 runs\n"
    wrong = camshaft("plot", str(runs), "--metric", "actor/entropie")
    assert (wrong.status, "no run has logged actor/entropie" in wrong.err) == (2, True)


def test_a_run_has_one_color_in_all_charts(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quantiles = {f"critic/score/p{number}": lambda step, n=number: n / 100 for number in (10, 50, 90)}
    make_run(tmp_path / "first", curves={**quantiles, "actor/kl_loss": lambda step: 0.1})
    make_run(tmp_path / "second", curves={**quantiles, "actor/kl_loss": lambda step: 0.2})
    figure = draw(find_runs(tmp_path))
    for axis in figure.axes:
        assert {line.get_color() for line in axis.lines} == {"C0", "C1"}, axis.get_title()
    charts = {axis.get_title(): axis for axis in figure.axes}
    assert [line.get_linestyle() for line in charts["KL"].lines] == ["-", "--"] * 2
    assert len(charts["Training reward"].lines) == len(charts["Training reward"].collections) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second"]


def test_a_constant_metric_is_a_line_in_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "run", curves={"actor/entropy": lambda step: 94.0 + 1e-13 * step})
    (axis,) = draw([RunFolder(run)], ["actor/entropy"]).axes
    low, high = axis.get_ylim()
    assert (low, high) == pytest.approx((94 * (1 - 1e-6), 94 * (1 + 1e-6)), rel=1e-9)


def test_every_pattern_of_a_panel_matches_a_documented_metric() -> None:
    names = [name.replace("<source>", "sums").replace("<age>", "1") for metric in METRICS for name in metric.names()]
    for panels in ROWS.values():
        for panel in panels:
            for pattern in panel.patterns:
                assert panel._replace(patterns=(pattern,)).select(names), pattern
    for name in HEADLINES:
        assert any(matches(pattern, name) for metric in METRICS for pattern in metric.names()), name


def test_the_views_leave_torch_out() -> None:
    code = "import sys, camshaft.view.text, camshaft.view.plot, camshaft.cli.runs"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True, timeout=60)
