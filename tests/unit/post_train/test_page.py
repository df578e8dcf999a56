"""The table and the page say what the files say."""

from glm5.post_train.page import Results, acceptance, live_table, write_post_train_page
from tests.unit.post_train.conftest import COMFORT, WITH_REWARD


def found(sort, guess):
    skills = {"sort": sort, "guess": guess}
    return {
        "skills": skills,
        "tokens": 100,
        "seconds": 2.0,
        "drafted": [40],
        "accepted": [10],
        "all_seconds": 3.0,
        "cpu_seconds": 1.0,
    }


def results(plan):
    made = Results(plan().recipe, {"base": 60.0, "rl": 120.0, "w4a8": None})
    made.took["base"] = {"seconds": 50.0, "cpu_seconds": 40.0, "peak_bytes": 2**30, "size_bytes": 5_000_000}
    made.measured["base"] = found([1.0, 0.0], [0.5, 0.5])
    return made


def test_the_table_shows_what_is_done_and_what_is_left(plan):
    lines = live_table(results(plan), "rl").splitlines()
    assert lines[1].split() == ["base", "train", "done", "50", "seconds", "0.500", "0.500", "1.25"]
    assert lines[2].split() == ["rl", "rl", "running", "ETA", "2.0", "minutes"]
    assert lines[3].split() == ["w4a8", "quantize"]
    assert lines[0].split()[4:6] == ["sort", "guess"]
    assert lines[4] == "estimated for what is left, measurements aside: 2.0 minutes"


def test_the_page_has_every_skill_by_stage_and_the_served_model_beside_the_best(plan, tmp_path):
    made = results(plan)
    for name, measured in (("rl", found([1.0, 1.0], [0.0, 0.5])), ("w4a8", found([1.0, 1.0], [0.5, 0.25]))):
        made.took[name], made.measured[name] = made.took["base"], measured
    page = write_post_train_page(tmp_path / "page.html", made).read_text()
    assert "<td>1.000 (gained 50.0)</td><td>0.250 (forgotten 25.0)</td>" in page
    assert "<td>w4a8</td><td>1.000</td><td>0.375 (given back 12.5)</td>" in page
    assert "<td>sort</td><td>rl</td><td>1.000</td><td>1.000</td><td>+0.00 points</td>" in page
    assert "<td>guess</td><td>base</td><td>0.500</td><td>0.375</td><td>-12.50 points</td>" in page
    assert "<p>Stages: 0 base, 1 rl, 2 w4a8.</p>" in page
    assert "a loss of more than 3 points" in page
    assert not made.is_within
    assert "not within 3" in live_table(made, None)
    assert "<td>all</td><td></td><td>159 s</td><td>123 s</td>" in page


def test_a_reward_model_has_no_row_of_skills_and_a_skill_that_is_imported_its_last_name(plan, tmp_path):
    made = Results(plan(WITH_REWARD).recipe, dict.fromkeys(("base", "liking", "rl", "w4a8")))
    made.recipe = plan(WITH_REWARD.replace('"guess"', f'"{COMFORT}"', 1)).recipe
    for name in ("base", "liking", "rl", "w4a8"):
        made.took[name] = {"seconds": 50.0, "cpu_seconds": 40.0, "peak_bytes": 2**30, "size_bytes": 5_000_000}
        if name != "liking":
            made.measured[name] = found([1.0], [0.5]) | {"skills": {"sort": [1.0], COMFORT: [0.5]}}
    page = write_post_train_page(tmp_path / "page.html", made).read_text()
    assert page.count("<td>liking</td>") == 1
    assert "<td>liking</td><td>train</td><td>50 s</td>" in page
    assert "<th>sort</th><th>Comfort</th>" in page


def test_acceptance_counts_the_own_token():
    assert acceptance({"drafted": [40, 40], "accepted": [30, 10]}) == "2.00"
    assert acceptance({"drafted": [0], "accepted": [0]}) == acceptance({"drafted": [], "accepted": []}) == ""
