"""Terminal tasks: what a folder may say, what earns a reward and what never does, in real boxes."""

import asyncio
import shutil

import pytest

from glm5.common.errors import ConfigError
from glm5.rl.environments.boxes import Boxes
from glm5.rl.environments.harbor import NUM_TURNS, Harbor
from glm5.rl.environments.harbor_task import read_task
from glm5.rl.environments.play import play, play_oracle
from glm5.rl.environments.protocol import EpisodeFailed, Reply
from glm5.rl.environments.table import make
from glm5.rl.environments.terminal import KINDS, SIZES, Terminal, write_tasks
from glm5.rl.environments.tool_use import call
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.sandbox.choice import candidates, reason_against
from glm5.rl.sandbox.sandbox import Limits, Sandbox

TOML = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'
RIGHT = 'if [ "$(cat /app/out.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("namespaces", marks=pytest.mark.long)])
def boxes(request):
    """Boxes of both kinds, which begin with the same links at their root."""
    found = [backend for backend in candidates() if backend.kind == request.param]
    if reason := reason_against(found[0]) if found else "not installed":
        pytest.skip(f"{request.param}: {reason}")
    return Boxes(lambda **limits: Sandbox(found[0], Limits(**limits)), found[0].python)


def written(folder, **files):
    """A task folder: TOML, an instruction, tests and a solution, unless they are given."""
    default = {"task.toml": TOML, "instruction.md": "Write 42 to /app/out.txt.", "tests/test.sh": RIGHT,
               "solution/solve.sh": "#!/bin/bash\necho 42 > /app/out.txt\n"}  # fmt: skip
    for path, text in (default | {name.replace("__", "/"): text for name, text in files.items()}).items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    return folder


def harbor(folder, boxes=None):
    return make(f"harbor/{folder}") if boxes is None else make(f"harbor/{folder}", boxes)


def played(environment, *commands, seed=0):
    replies = iter([*(Reply("", tool_calls=[call("bash", command=command)]) for command in commands), Reply("done")])
    return play(environment, environment.task(seed, 0), lambda _: next(replies))


def reward(environment, *commands):
    return played(environment, *commands).rewards[0]


def check_gates(environment, seed, level):
    task = environment.task(seed, level)
    solved, idle = play_oracle(environment, task), play(environment, task, lambda _: Reply("done"))
    assert (solved.rewards, idle.rewards) == ([1.0], [0.0]), (seed, level, solved.conversations[0])
    assert environment.task(seed, level).key == task.key


def test_one_task_of_a_kind_passes_the_gates(boxes):
    for level in range(len(SIZES)):
        check_gates(Terminal(boxes), 3 * level, level)


@pytest.mark.slow
def test_every_kind_and_level_passes_the_gates(boxes):
    for seed in range(len(KINDS)):
        for level in range(len(SIZES)):
            check_gates(Terminal(boxes), seed, level)


def test_tasks_differ():
    for level in range(len(SIZES)):
        assert len({Terminal().task(seed, level).key for seed in range(150)}) == 150


def test_written_tasks_are_read_as_they_were_made(tmp_path, boxes):
    write_tasks(tmp_path / "tasks", 6)
    environment = harbor(tmp_path / "tasks", boxes)
    made = {one.name: one for one in (Terminal().made(number // 3, number % 3) for number in range(6))}
    for seed in range(6):
        read = environment.made(seed, 0)
        assert read.steps[0].tests == made[read.name].steps[0].tests
        assert read.files == made[read.name].files
    check_gates(environment, 0, 0)
    with pytest.raises(ConfigError, match="exists"):
        write_tasks(tmp_path / "tasks", 1)


def test_a_dockerfile_and_variables(tmp_path, boxes):
    docker = """FROM python:3.12-slim
# what is there at first
WORKDIR /app/work
ENV GREETING="good day" OTHER=1
COPY start.sh data/ ./
RUN ./start.sh && \\
    echo built > built.txt
"""
    toml = '[environment.env]\nOTHER = "2"\n[environment.healthcheck]\ncommand = "test -e built.txt"\n'
    toml += '[verifier.env]\nWANTED = "good day 2 x built"\n[solution.env]\nSAID = "a \'b\'"\n'
    tests = 'w=/app/work; [ "$(cat $w/out.txt)" = "$WANTED" ] && [ "$(cat $w/said)" = "a \'b\'" ] && r=1 || r=0\n'
    tests += "echo $r > /logs/verifier/reward.txt"
    solve = 'echo "$GREETING $OTHER" $(cat x.txt built.txt) > out.txt; echo "$SAID" > said'
    files = {"environment/Dockerfile": docker, "environment/start.sh": "#!/bin/sh\nmv y.txt x.txt\n",
             "environment/data/y.txt": "x\n", "task.toml": toml, "tests/test.sh": tests,
             "solution/solve.sh": solve}  # fmt: skip
    written(tmp_path / "one", **files)
    check_gates(harbor(tmp_path, boxes), 0, 0)


@pytest.mark.parametrize(("strategy", "half"), [("mean", 0.5), ("final", 0.0)])
def test_steps_follow_each_other(tmp_path, boxes, strategy, half):
    steps = {f"steps/{name}/{file}": text for name, value in (("a", 1), ("b", 2)) for file, text in {
        "instruction.md": f"Write {value} to {name}.txt.",
        "tests/test.sh": f'[ "$(cat {name}.txt)" = {value} ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt',
        "solution/solve.sh": f"echo {value} > {name}.txt"}.items()}  # fmt: skip
    steps["steps/b/workdir/setup.sh"] = "mv a.txt old.txt\n"
    toml = f'multi_step_reward_strategy = "{strategy}"\n[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
    written(tmp_path / "one", **{"task.toml": toml, **steps})
    environment = harbor(tmp_path, boxes)
    check_gates(environment, 0, 0)
    replies = iter([Reply("", tool_calls=[call("bash", command="echo 1 > a.txt")]), Reply("next"), Reply("end")])
    first_alone = play(environment, environment.task(0, 0), lambda _: next(replies))
    assert first_alone.rewards == [half]
    assert "Write 2" in first_alone.conversations[0][-2]["content"]


def test_separate_grading_sees_artifacts_alone(tmp_path, boxes):
    toml = '[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\ncommand = "cp late.txt kept/"\n'
    toml = 'artifacts = ["/app/out.txt", {source = "/app/kept", exclude = ["*.tmp"]}]\n' + toml
    tests = '[ "$(cd /app && find . -type f | sort | tr "\\n" " ")" = "./kept/late.txt ./out.txt " ] && r=1 || r=0\n'
    solve = "mkdir kept; touch kept/a.tmp late.txt other.txt; echo 42 > out.txt"
    files = {
        "task.toml": toml,
        "tests/test.sh": tests + "echo $r > /logs/verifier/reward.txt",
        "solution/solve.sh": solve,
    }
    written(tmp_path / "one", **files)
    check_gates(harbor(tmp_path, boxes), 0, 0)


@pytest.mark.parametrize(
    ("written_json", "wanted"),
    [
        ('{"reward": 1, "speed": 0.25}', 1.0),
        ('{"a": 1, "b": 0.5}', 0.75),
        ("0.25", 0.25),
        ('{"reward": NaN}', None),
        ("{}", None),
        ('{"reward": "1"}', None),
        ("[1]", None),
        ("1e999", None),
    ],
)
def test_rewards_in_json(tmp_path, boxes, written_json, wanted):
    tests = f"echo 0.5 > /logs/verifier/reward.txt; echo '{written_json}' > /logs/verifier/reward.json"
    written(tmp_path / "one", **{"tests/test.sh": tests})
    if wanted is not None:
        assert reward(harbor(tmp_path, boxes)) == wanted
        return
    with pytest.raises(EpisodeFailed) as failed:  # whatever the policy does: the environment's fault
        reward(harbor(tmp_path, boxes))
    assert failed.value.kind == "environment"


CHEATS = {
    "reward written beforehand": "mkdir -p /logs/verifier; echo 1 | tee /logs/verifier/reward.txt",
    "reward.json beforehand": "echo 1 > /logs/verifier/reward.json",
    "reward in a folder that cannot be emptied": "cd /logs/verifier; echo 1 > reward.json; chmod 555 . /logs",
    "patched test.sh": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests",
    "tests are a link": "mkdir /app/t; ln -s /box/work/app/t /box/work/tests; echo 'exit 0' > /app/t/test.sh",
    "logs are a link": "cd ~; echo 1 > logs/verifier/reward.json; mv logs app/; ln -s app/logs",
    "verifier is a link": "mkdir /app/v; echo 1 > /app/v/reward.json; cd /logs; rm -r verifier; ln -s /app/v verifier",
    "rewriting process": "setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.json; done' >/dev/null 2>&1 &",
    "program named as one of the tests'": "echo 'echo 42' > cat; chmod +x cat; cp cat ~/; export PATH=.:$PATH",
    "shell's start files": "echo 'echo 1 > /logs/verifier/reward.json' | tee ~/.bashrc ~/.profile ~/.bash_profile",
    "answer taken from the tests by a link": "ln -s /tests/test.sh out.txt",
    "the folder is a link to the tests": "cd /box/work; rm -r app; ln -s tests app",
    "huge file": "head -c 300M /dev/zero > big; truncate -s 90G out.txt",
    "fork bomb": "f() { f | f & }; f; sleep 9",
    "broken by memory": "head -c 900M /dev/zero | tail | wc -c",
    "no folder": "rm -rf /box/work/*; touch /box/work/app",
    "unreadable": "echo 42 > out.txt; chmod 0 out.txt",
}


@pytest.fixture(scope="module")
def plain(boxes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    written(folder / "one")
    return harbor(folder, boxes)


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_earn_nothing(plain, cheat):
    assert reward(plain, CHEATS[cheat]) == 0.0


def test_the_first_cheats_earn_nothing_and_honest_work_does(plain):
    assert reward(plain, *list(CHEATS.values())[:3]) == 0.0
    assert reward(plain, CHEATS["reward written beforehand"], "echo 42 > out.txt") == 1.0  # a control


def test_compiled_python_is_not_graded(tmp_path, boxes):
    """The file that is graded has the size and the time of the one that was compiled."""
    tests = "cd /app; python3 -c 'import answer; print(answer.x)' > /logs/verifier/reward.txt"
    written(tmp_path / "one", **{"tests/test.sh": tests, "environment/Dockerfile": "COPY answer.py ./\n",
                                 "environment/answer.py": "x = 0\n"})  # fmt: skip
    cheat = "cp -p answer.py old; echo 'x = 1' > answer.py; touch -r old answer.py; unset PYTHONDONTWRITEBYTECODE\n"
    cheat += "python3 -c 'import answer'; ls __pycache__; mv old answer.py"
    environment = harbor(tmp_path, boxes)
    done = played(environment, cheat)
    assert ".pyc" in done.conversations[0][-2]["content"]
    assert done.rewards == [0.0]
    user = (
        "d=$(python3 -m site --user-site); mkdir -p $d; echo 'print(1); import os; os._exit(0)' > $d/usercustomize.py"
    )
    assert reward(environment, user) == 0.0


def test_who_broke_the_grading_is_told_apart(tmp_path, boxes):
    tests = 'read x < /app/x.txt; [ "$x" ] && kill -9 $$; echo 0 > /logs/verifier/reward.txt'
    written(tmp_path / "one", **{"tests/test.sh": tests})
    broken = played(harbor(tmp_path, boxes), "echo 1 > x.txt")
    assert (broken.rewards, broken.last.metrics["broken"]) == ([0.0], 1.0)
    written(tmp_path / "one", **{"tests/test.sh": "exit 0"})
    with pytest.raises(EpisodeFailed, match="none at the start") as failed:
        reward(harbor(tmp_path, boxes), "echo 42 > out.txt")
    assert failed.value.kind == "environment"


def test_limits_and_times(tmp_path, boxes):
    toml = "[agent]\ntimeout_sec = 2\n[environment]\nmemory_mb = 64\nstorage_mb = 16\n[verifier]\ntimeout_sec = 0.5\n"
    written(tmp_path / "one", **{"task.toml": toml, "tests/test.sh": "[ -e slow ] && sleep 9\n" + RIGHT})
    done = played(harbor(tmp_path, boxes), "touch slow; head -c 20M /dev/zero > x; sleep 5", "ls")
    assert "No space" in done.conversations[0][2]["content"]
    assert "used up" in done.conversations[0][4]["content"]
    assert (done.rewards, done.last.metrics["broken"]) == ([0.0], 1.0)


def test_workers_find_a_folder_by_a_relative_path(tmp_path, monkeypatch):
    written(tmp_path / "tasks" / "one")
    monkeypatch.chdir(tmp_path)

    async def key():
        async with EnvironmentWorkers(["harbor/tasks"]) as workers:
            return (await workers.task("harbor/tasks", 0, 0)).key

    assert asyncio.run(key()) == harbor("tasks").task(0, 0).key


def test_replies_are_bounded(plain):
    episode = plain.reset(plain.task(0, 0))
    wrong = Reply("", tool_calls=[{"function": {"name": "bash", "arguments": {"command": 5}}}])
    turns = [episode.step(wrong) for _ in range(NUM_TURNS)]
    assert [turn.is_done for turn in turns] == [False] * (NUM_TURNS - 1) + [True]
    assert turns[0].messages[0]["content"] == "error: 'command' must be text, not int"
    episode.close()


def test_the_paths_at_the_root_are_links_into_the_folder(boxes):
    box = boxes.open()
    names = ("app", "logs", "solution", "tests")
    done = box.run([*("readlink", "-m"), *(f"/{name}" for name in names)])
    assert done.stdout.decode().split() == [f"/box/work/{name}" for name in names]
    assert box.run("rm /app || ln -sfn /usr /app || touch /x").exit_code == 1
    box.close()


def test_nothing_of_tests_or_solution_is_in_the_box(plain):
    seen = played(plain, "ls -A /tests /solution / /box/work /logs/verifier; grep -rs 42 /box /app /logs; env")
    said = seen.conversations[0][2]["content"]
    assert "solve" not in said
    assert "42" not in said
    assert "test.sh" not in said


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ('schema_version = "2.0"', "schema_version: got '2.0'"),
        ('version = "1.3"', ""),
        ("[environment]\ngpus = 1", "environment.gpus: got 1; allowed: nothing, as boxes have no GPU"),
        ('[environment]\nnetwork_mode = "public"', "environment.network_mode: got 'public'; allowed: no-network"),
        ('[environment]\nallowed_hosts = ["a.org"]', "environment.allowed_hosts"),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.network_mode"),
        ('[agent]\nuser = "me"', "agent.user: got 'me'; allowed: nothing, as a box has one user"),
        ('[verifier]\nuser = "me"', "verifier.user"),
        ('[verifier]\nenvironment_mode = "own"', "verifier.environment_mode"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment: nothing"),
        ('[environment]\nos = "windows"', "environment.os"),
        ('[environment]\ndocker_image = "nvidia/cuda:12"', "environment.docker_image"),
        ('[environment]\ndocker_image = "ubuntu:24.04"\ncpus = 4\nmemory_mb = 2048\nstorage_mb = 10240', ""),
        ("[environment]\nmemory_mb = 99999", "environment.memory_mb: got 99999; allowed: at most 16384"),
        ('[environment]\nskills_dir = "/s"', "environment.skills_dir"),
        ('[[environment.mcp_servers]]\nname = "x"', "environment.mcp_servers"),
        ('[environment]\nworkdir = "/root"', "environment.workdir: got '/root'; allowed: /app or /logs"),
        ('[environment.env]\nKEY = "${KEY}"', "environment.env: names of"),
        ('artifacts = ["/etc/passwd"]', "artifacts.0.source"),
        ('[[artifacts]]\nsource = "/app/x"\nservice = "db"', "artifacts.0.service"),
        ("[environment]\nmemory = 3", "environment.memory: no such key; did you mean memory_mb?"),
        ('[task]\nname = "a/b"\nkeywords = ["x"]\n[metadata]\nlevel = 3', ""),
    ],
)
def test_keys_are_honoured_or_refused_by_name(tmp_path, toml, told):
    folder = written(tmp_path / "one", **{"task.toml": toml})
    if not told:
        assert read_task(folder).name == "one"
        return
    with pytest.raises(ConfigError) as refused:
        Harbor(str(tmp_path))
    assert told in str(refused.value)
    assert str(folder / "task.toml") in str(refused.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("FROM nvidia/cuda", "python, debian or ubuntu"),
        ("RUN apt-get install -y jq", "installs nothing"),
        ("RUN pip install x", "installs nothing"),
        ("USER me", "FROM, WORKDIR, ENV, COPY"),
        ("COPY missing.txt .", "sources that are in environment/"),
        ("COPY --chmod=755 a /app/", "sources that are in environment/"),
        ("COPY Dockerfile /etc/x", "/app or /logs"),
        ("WORKDIR /root", "/app or /logs"),
        ("ENTRYPOINT x", "FROM, WORKDIR"),
    ],
)
def test_of_a_dockerfile_a_part_is_understood(tmp_path, line, told):
    folder = written(tmp_path / "one", **{"environment/Dockerfile": f"FROM ubuntu:24.04\n{line}\n"})
    with pytest.raises(ConfigError) as refused:
        read_task(folder)
    assert told in str(refused.value)
    assert "Docker" in str(refused.value)


@pytest.mark.parametrize("name", ["environment/docker-compose.yaml", "trajectory.json", "solution/other.py"])
def test_files_that_are_refused(tmp_path, name):
    folder = written(tmp_path / "one", **{name: "{}"})
    with pytest.raises(ConfigError, match=name.split("/")[0]):
        read_task(folder)
    shutil.rmtree(folder)
    written(folder, **{"tests/test.sh": None})
    with pytest.raises(ConfigError, match="must be there"):
        read_task(folder)
