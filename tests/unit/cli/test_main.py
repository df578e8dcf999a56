"""The command line as a person meets it: exit codes and one-line errors."""

import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from glm5 import __version__
from glm5.cli import init, serve
from glm5.cli import main as module
from glm5.cli.main import COMMANDS, main
from glm5.common.atomic import atomic_dir
from glm5.common.errors import ConfigError, GlmError

GUIDE = (
    "serve zai-org/GLM-5-FP8 --tensor-parallel-size 8 --max-model-len 32768 "
    "--gpu-memory-utilization 0.90 --trust-remote-code"
)

UNSHARDED = "every GPU has its part of every layer"
SHARED = "--tensor-parallel-size says how many GPUs share a model"
LESS = "; a smaller model, batch or length needs less"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"glm5 {__version__}\n"


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert {name.split()[0] for name in COMMANDS} <= set(text.split())


def test_help_of_a_group_lists_its_commands(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"    {name}" in text for name in ("throughput", "latency", "serve"))


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    assert "usage: glm5" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    assert f"usage: glm5 {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("inspekt x", "no command 'inspekt'; did you mean inspect?"),
        ("xyz", f"no command 'xyz'; allowed: {', '.join(dict.fromkeys(name.split()[0] for name in COMMANDS))}"),
        ("--verzion", "glm5 has no flag --verzion; did you mean --version?"),
        ("init --preset nano", "the following arguments are required: --out; see  glm5 init --help"),
        ("init --preset huge --out x", "--preset: got 'huge'; allowed: 'glm-5', 'glm-5.2', 'nano' or 'tiny'"),
        ("inspect", "allowed: either a checkpoint (folder or id) or --preset; got neither"),
        ("inspect x --preset nano", "allowed: either a checkpoint (folder or id) or --preset; got both"),
        (GUIDE + " -pp 2", f"--pipeline-parallel-size: got '2'; allowed: 1 ({UNSHARDED}; {SHARED})"),
        ("serve m --max-model-length 1", "glm5 serve has no flag --max-model-length; did you mean --max-model-len?"),
        ("serve m --kv-cache-dtype int4",
         "--kv-cache-dtype: got 'int4'; allowed: 'auto', 'bfloat16', 'fp8_key' or 'fp8'"),
        ("serve m --tool-call-parser hermes", "--tool-call-parser: got 'hermes'; allowed: 'glm45' or 'glm47'"),
        ("generate m --no-enable-thinking",
         "allowed: --enable-thinking and --no-enable-thinking with --chat; other texts are continued as they are"),
        ("generate m Hello you",
         "glm5 generate takes no 'Hello' 'you'; texts are given by  --prompt \"TEXT\"  or on standard input"),
        ("rl veiw m",
         ("glm5 rl takes no 'm'; see also  glm5 rl view FOLDER,  glm5 rl replay FOLDER STEP  "
          "and  glm5 rl filter RECIPE")),
        ("rl view m --prot 1", "glm5 rl view has no flag --prot; did you mean --port?"),
        ("rl replay m 0", "STEP: got '0'; allowed: at least 1"),
        ("inspect m n", "glm5 inspect takes no 'n'; see  glm5 inspect --help"),
        ("serve ''", "MODEL: got ''; allowed: a text that is not empty"),
        ("serve m --served-model-name a ''", "--served-model-name: got ''; allowed: a text that is not empty"),
        ("serve m --host ''", "--host: got ''; allowed: a text that is not empty"),
        ("generate m --prompt ''", "--prompt: got ''; allowed: a text that is not empty"),
        ("inspect ''", "SOURCE: got ''; allowed: a text that is not empty"),
        ("train ''", "RECIPE: got ''; allowed: a text that is not empty"),
        ("serve m --port 99999", "--port: got '99999'; allowed: at most 65535"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_exit_code_2_and_one_line(argv, message, capsys):
    assert main(shlex.split(argv)) == 2
    assert capsys.readouterr().err == f"glm5: error: {message}\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (GlmError("it is broken"), 1, "glm5: error: it is broken\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "glm5: error: [Errno 2] No such file: 'x'\n"),
        (
            RuntimeError("can't allocate memory: 8\n#0"),
            1,
            f"glm5: error: out of memory: can't allocate memory: 8{LESS}\n",
        ),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_errors_of_a_command(monkeypatch, capsys, error, code, line):
    def fail(_argv):
        raise error

    monkeypatch.setattr(module, "_run", fail)
    assert main(["init"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("said", "code", "line"),
    [
        ("seed: got 1; allowed: 2 or num_hidden_layers", 2, "--seed: got 1; allowed: 2 or --num-hidden-layers"),
        ("max_model_len: got 1; allowed: 2", 1, "max_model_len: got 1; allowed: 2"),
        ("/seed/config.json: seed: got 1", 1, "/seed/config.json: seed: got 1"),
    ],
)
def test_a_setting_is_a_flag_where_the_command_has_it(monkeypatch, capsys, said, code, line):
    def fail(_args):
        raise ConfigError(said)

    monkeypatch.setattr(init, "run", fail)
    assert main(["init", "--preset", "nano", "--out", "nowhere"]) == code
    assert capsys.readouterr().err == f"glm5: error: {line}\n"


def lose_ctrl_c(*_):
    """As some modules do while they are imported."""
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_an_import_loses_ends_the_command_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr(init, "add", lambda parser, add=init.add: (lose_ctrl_c(), add(parser)))
    monkeypatch.setattr(init, "run", lambda _args: pytest.fail("it ran"))
    assert main(["init", "--preset", "nano", "--out", "nowhere"]) == 130
    monkeypatch.setattr(serve, "read_keys", lose_ctrl_c)
    monkeypatch.setattr("glm5.serve.http.server.bind", lambda *_: pytest.fail("it ran"))
    assert main(["serve", "m"]) == 130
    assert capsys.readouterr().err == "\n\n"


def test_what_runs_no_command_imports_none_and_no_other_package():
    code = """
import sys
before = set(sys.modules)
from glm5.cli.main import COMMANDS, main
for argv in ("", "--help", "--version", "inspekt", "bench", "bench --help", "bench no", "--hepl"):
    main(argv.split())
imported = sys.modules.keys() - before
packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"glm5"}
commands = {f"glm5.cli.{name.replace(' ', '_')}" for name in COMMANDS} & imported
sys.exit(f"imported: {packages | commands}" if packages | commands else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_request_to_end_leaves_nothing_half_written(monkeypatch, tmp_path):
    folder = tmp_path / "model"

    def interrupted(_args):
        with atomic_dir(folder) as building:
            (building / "half").write_text("")
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(init, "run", interrupted)
    with pytest.raises(SystemExit) as left:
        main(["init", "--preset", "nano", "--out", str(folder)])
    assert left.value.code == 143
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_said(tmp_path, monkeypatch, capsys):
    """MKL would end the process, as it cannot find torch's library."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(init, "run", lambda _args: pytest.fail("it ran"))
    assert main(["init", "--preset", "nano", "--out", "model"]) == 1
    assert capsys.readouterr().err == (
        "glm5: error: the folder in which this was started is gone; cd to one that exists\n"
    )


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(_argv):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["init"])


def test_a_reader_that_leaves_is_no_error_message():
    pipe = f"{sys.executable} -m glm5 inspect --preset glm-5 | true"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_python_m_glm5_is_the_command():
    done = subprocess.run([sys.executable, "-m", "glm5", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"glm5 {__version__}\n"
