"""`glm5 inspect` and `glm5 init`, and what `glm5 merge` does not replace either."""

import json
import subprocess
import sys

import pytest

from glm5.cli.main import main


def as_json(capsys, *argv: str) -> dict:
    main(["inspect", *argv, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "total", "with_mtp"),
    [("glm-5", 743911199232, 753864119552), ("glm-5.2", 743377000704, 753329921024)],
)
def test_preset_counts_as_numbers(capsys, name, total, with_mtp):
    report = as_json(capsys, "--preset", name)
    assert (report["parameters"]["total"], report["parameters"]["with_mtp"]) == (total, with_mtp)
    assert report["parameters"]["biases"] == 19456
    assert report["num_bytes"] == 2 * with_mtp + 4 * 19456 == sum(report["bytes_by_part"].values())


def test_preset_text(capsys):
    assert main(["inspect", "--preset", "glm-5"]) == 0
    text = capsys.readouterr().out
    for part in ("743,911,199,232  without MTP", "753,864,119,552  with MTP", "19,456  router biases"):
        assert part in text


def test_preset_allocates_nothing_and_imports_no_torch():
    code = (
        "import sys; from glm5.cli.main import main; main(['inspect', '--preset', 'glm-5']);"
        "print(sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules)));"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, peak_kilobytes = done.stdout.splitlines()[-2:]
    assert modules == "[]"
    assert int(peak_kilobytes) < 150_000


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("init") / "tiny"
    assert main(["init", "--preset", "tiny", "--out", str(out), "--seed", "3"]) == 0
    return out


@pytest.mark.parametrize("weights", ["bfloat16", "none"])
def test_init_replaces_weights_only_when_told(tmp_path, capsys, weights):
    out = tmp_path / "out"
    init = ["init", "--preset", "tiny", "--out", str(out)]
    assert main([*init, "--weights", "none"]) == 0
    assert main(init) == 0  # nothing is lost
    before = (out / "model.safetensors").read_bytes()
    assert main([*init, "--seed", "4", "--weights", weights]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"glm5: error: {out} holds weights, 1 file (model.safetensors); use them as they are, give another directory, "
        "or --overwrite to replace them"
    )
    assert (out / "model.safetensors").read_bytes() == before
    assert main([*init, "--seed", "4", "--weights", weights, "--overwrite"]) == 0
    assert not (out / "model.safetensors").exists() or (out / "model.safetensors").read_bytes() != before


def test_merge_asks_before_a_model_is_read(tiny_checkpoint, capsys):
    assert main(["merge", "nowhere", "adapter", "--out", str(tiny_checkpoint)]) == 1
    assert "tiny holds weights, 1 file (model.safetensors); use them as they are" in capsys.readouterr().err


def test_init_writes_what_inspect_accepts(tiny_checkpoint, capsys):
    assert main(["inspect", str(tiny_checkpoint)]) == 0
    text = capsys.readouterr().out
    assert text.endswith("it loads\n")
    preset, checkpoint = as_json(capsys, "--preset", "tiny"), as_json(capsys, str(tiny_checkpoint))
    assert checkpoint["parameters"] == preset["parameters"]
    assert checkpoint["bytes_by_part"] == preset["bytes_by_part"]
    assert checkpoint["bytes_by_dtype"] == preset["bytes_by_dtype"]


def test_unknown_keys_and_what_would_not_load_are_listed(tiny_checkpoint, tmp_path, capsys):
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"hidden_colour": "blue", "moe_intermediate_size": 48, "index_topk_pattern": "FFFF"}
    del config["indexer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "unknown config keys, kept  hidden_colour" in text
    assert "missing     model.layers.2.self_attn.indexer.wq_b.weight" in text
    assert "misshaped   model.layers.1.mlp.experts.0.gate_proj.weight" in text
    assert text.endswith("it would not load, for the reasons above\n")


def test_what_is_not_there_is_said(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("glm5: error: ")
    assert "nothing" in error
