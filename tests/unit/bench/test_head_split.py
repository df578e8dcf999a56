"""`python -m glm5.bench.optimizers.head_split`: its table and its picture."""

from glm5.bench.optimizers.head_split import main


def test_starved_heads_are_shown(tmp_path, capsys):
    plot = tmp_path / "split.png"
    assert main(["--heads", "4", "--rows", "16", "--cols", "16", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole, split = ([float(number) for number in line.split()[1:]] for line in lines[2:])
    assert whole[2] > 30
    assert 0.9 < split[2] < 1.1
    assert plot.read_bytes().startswith(b"\x89PNG")
